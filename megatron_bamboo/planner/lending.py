"""Which nodes could change their pipeline, where no standby is there to help.

A pipeline that one node runs alone has no shadows: it borrows a node from the largest one, or the
two smallest become one, by Oobleck's rules (``reconfigure.py``). By the same rules pipelines that
were dissolved are split off again from those that can spare nodes. And the largest may lend a node
to the smallest where nobody needs it. Whether any of it is worth its price is judged elsewhere.
"""

from collections.abc import Iterator

from megatron_bamboo.planner.growing import growable
from megatron_bamboo.planner.new_cut import NewCut, crew_of
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.reconfigure import reconfigure
from megatron_bamboo.planner.regroup import PipelineNodes, Sizes

Crews = dict[int, tuple[str, ...]]


def lendings(plan: Plan, least: int, most: int) -> Iterator[NewCut]:
    """The new cuts for which nodes change their pipelines.

    Args:
        least: nodes that a pipeline needs; ``most``: nodes that it has stages for.
    """
    crews = {number: crew_of(pipe) for number, pipe in enumerate(plan.pipelines) if pipe.stages}
    sizes = [len(nodes) for nodes in crews.values()]
    spare = sum(sizes) - least * len(sizes)
    if len(set(sizes)) == 1 and sizes[0] >= least and not (growable(plan) and spare >= least):
        return  # nobody is short of a node, or has one too many
    wanted = [_by_rules(plan, crews, Sizes(least, most, f)) for f in (0, len(plan.pipelines) - 1)]
    for number, after in enumerate((*wanted, _loan(crews, least))):
        changed = {n: nodes for n, nodes in after.items() if set(nodes) != set(crews.get(n, ()))}
        if changed and after not in wanted[:number]:
            yield NewCut(tuple(sorted(changed.items())))


def _by_rules(plan: Plan, crews: Crews, sizes: Sizes) -> Crews:
    """By pipeline the nodes that it has by Oobleck's rules."""
    old = [PipelineNodes(nodes, plan.pipelines[n].shape.num_stages) for n, nodes in crews.items()]
    found = reconfigure(old, sizes)
    numbers, free = list(crews), list(growable(plan))
    if found.standbys or not found.pipelines or found.before.count(None) > len(free):
        return crews
    after: Crews = dict.fromkeys(crews, ())
    for pipeline, before in zip(found.pipelines, found.before, strict=True):
        after[free.pop(0) if before is None else numbers[before]] = pipeline.nodes
    return after


def _loan(crews: Crews, least: int) -> Crews:
    """By pipeline the nodes that it has when the largest lends one to the smallest."""
    sizes = {number: len(nodes) for number, nodes in crews.items()}
    giver, taker = max(sizes, key=lambda n: sizes[n]), min(sizes, key=lambda n: sizes[n])
    if sizes[giver] - 1 < max(least, sizes[taker] + 1):
        return crews
    *kept, lent = crews[giver]
    return {**crews, giver: tuple(kept), taker: (*crews[taker], lent)}
