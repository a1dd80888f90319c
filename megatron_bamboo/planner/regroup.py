"""Oobleck's rules for which pipeline a node belongs to, one by one.

They work on a draft: each rule is applied to all pipelines before the next one, and notes what it
did and why. ``reconfigure`` says in which order.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum


class Rule(StrEnum):
    """What is done to a pipeline."""

    DROP = "drop"
    MERGE = "merge"
    BORROW = "borrow"
    SPLIT = "split"
    GROW = "grow"
    RESIZE = "resize"
    REST = "rest"


@dataclass(frozen=True, slots=True)
class Applied:
    """One use of a rule, and what for."""

    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many nodes a pipeline can have, and how many losses the model should survive.

    Args:
        least: nodes that hold the model, replicas counted: the smallest template (n0).
        most: nodes of the largest template.
        fault_tolerance: f; it takes f + 1 pipelines.

    Raises:
        ValueError: there is no such template.
    """

    least: int
    most: int
    fault_tolerance: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"templates of {self.least} to {self.most} nodes: there is none")
        if self.fault_tolerance < 0:
            raise ValueError(f"fault tolerance {self.fault_tolerance}: it must be 0 or above")


@dataclass(frozen=True, slots=True)
class PipelineNodes:
    """The live nodes of a pipeline in the order of their stages, and how many stages there are.

    After a takeover there are more stages than nodes.
    """

    nodes: tuple[str, ...]
    num_stages: int


@dataclass(slots=True)
class DraftPipeline:
    """A pipeline in the making; ``before`` is the number that it had, None if it is new."""

    name: str
    before: int | None
    nodes: list[str]


@dataclass(slots=True)
class Draft:
    """What has become of the pipelines so far. Each rule is applied to all before the next one."""

    sizes: Sizes
    free: list[str]
    pipelines: list[DraftPipeline] = field(default_factory=list)
    merged: dict[str, str] = field(default_factory=dict)
    """By free node the pipeline that it comes from, if it had one."""
    applied: list[Applied] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """All that stay or are free."""
        return len(self.free) + sum(len(pipeline.nodes) for pipeline in self.pipelines)

    def drop(self, old: Sequence[PipelineNodes], leaving: Set[str]) -> None:
        """Those who leave; a pipeline that has nobody left is no more."""
        for number, pipeline in enumerate(old):
            name = f"pipeline {number}"
            kept = [node for node in pipeline.nodes if node not in leaving]
            gone = [node for node in pipeline.nodes if node in leaving]
            if not kept:
                self._note(Rule.DROP, f"{name} has no node left: it had {_listed(gone) or 'none'}")
                continue
            if gone:
                self._note(Rule.DROP, f"{name} loses {_listed(gone)}, {len(kept)} left")
            self.pipelines.append(DraftPipeline(name, number, kept))

    def merge(self) -> None:
        """Dissolve the smallest pipelines where there are too few nodes for all."""
        while len(self.pipelines) > self.num_nodes // self.sizes.least:
            smallest = min(reversed(self.pipelines), key=lambda p: len(p.nodes))
            self.pipelines.remove(smallest)
            self.merged |= dict.fromkeys(smallest.nodes, smallest.name)
            # They hold state, so they come before nodes that hold none.
            self.free[:0] = smallest.nodes
            self._note(
                Rule.MERGE,
                f"{smallest.name} is dissolved: {self.num_nodes} nodes are too few for "
                f"{len(self.pipelines) + 1} pipelines of {self.sizes.least}",
            )

    def fill(self) -> None:
        """Bring each pipeline to the smallest template, from free nodes or from the largest."""
        for short in sorted(self.pipelines, key=lambda p: -len(p.nodes)):
            while len(short.nodes) < self.sizes.least:
                if self.free:
                    self._join(short, f"which needs {self.sizes.least} nodes")
                    continue
                giver, node = self._borrowed()
                short.nodes.append(node)
                self._note(
                    Rule.BORROW,
                    f"{short.name} borrows {node} from {giver}, which has the most nodes",
                )

    def shorten(self) -> None:
        """Free the nodes that no template has a place for."""
        for pipeline in self.pipelines:
            extra = pipeline.nodes[self.sizes.most :]
            if extra:
                del pipeline.nodes[self.sizes.most :]
                self.merged |= dict.fromkeys(extra, pipeline.name)
                self.free[:0] = extra
                self._note(
                    Rule.SPLIT,
                    f"{pipeline.name} gives up {_listed(extra)}: the largest template has "
                    f"{self.sizes.most} nodes",
                )

    def split(self) -> None:
        """Make the pipelines that are missing for protection, from whoever can be spared."""
        needed = self.sizes.fault_tolerance + 1
        while (
            len(self.pipelines) < needed
            and (len(self.pipelines) + 1) * self.sizes.least <= self.num_nodes
        ):
            givers: list[str] = []
            nodes = [self.free.pop(0) for _ in range(min(self.sizes.least, len(self.free)))]
            while len(nodes) < self.sizes.least:
                giver, node = self._borrowed()
                nodes.append(node)
                givers += [giver] if giver not in givers else []
            split = f", split off from {_listed(givers)}" if givers else ""
            self._found(nodes, Rule.SPLIT if givers else Rule.GROW, f"{split}: {needed} are needed")

    def grow(self) -> None:
        """Use free nodes for pipelines like the largest, then for the smallest; the rest waits."""
        while len(self.free) >= self.sizes.least:
            largest = max((len(pipeline.nodes) for pipeline in self.pipelines), default=0)
            size = min(max(largest, self.sizes.least), len(self.free))
            nodes = [self.free.pop(0) for _ in range(size)]
            self._found(nodes, Rule.GROW, f": {size} nodes were free")
        while self.free and self.pipelines:
            smallest = min(self.pipelines, key=lambda p: len(p.nodes))
            if len(smallest.nodes) == self.sizes.most:
                break
            self._join(smallest, "which has the fewest nodes")
        for node in self.free:
            full = f"no pipeline takes more than {self.sizes.most} nodes"
            none = f"{self.sizes.least} nodes make a pipeline"
            self._note(Rule.REST, f"{node} waits as a standby: {full if self.pipelines else none}")

    def resize(self, old: Sequence[PipelineNodes]) -> None:
        """Name the pipelines that are cut otherwise than before."""
        for pipeline in self.pipelines:
            if pipeline.before is not None:
                had, has = old[pipeline.before].num_stages, len(pipeline.nodes)
                if had != has:
                    self._note(
                        Rule.RESIZE,
                        f"{pipeline.name} takes the template for {has} nodes, not {had}",
                    )

    def _borrowed(self) -> tuple[str, str]:
        """A node of the largest pipeline, which can spare it, and that pipeline's name."""
        giver = max(self.pipelines, key=lambda p: len(p.nodes))
        assert len(giver.nodes) > self.sizes.least, "merged until someone can spare a node"
        return giver.name, giver.nodes.pop()

    def _join(self, pipeline: DraftPipeline, reason: str) -> None:
        node = self.free.pop(0)
        pipeline.nodes.append(node)
        origin = self.merged.get(node)
        if origin is None:
            self._note(Rule.GROW, f"{node} joins {pipeline.name}, {reason}")
        else:
            self._note(Rule.MERGE, f"{node} of {origin} joins {pipeline.name}, {reason}")

    def _found(self, nodes: list[str], rule: Rule, reason: str) -> None:
        name = f"the pipeline of {nodes[0]}"
        self.pipelines.append(DraftPipeline(name, None, nodes))
        self._note(rule, f"{_listed(nodes)} make a new pipeline{reason}")

    def _note(self, rule: Rule, reason: str) -> None:
        self.applied.append(Applied(rule, reason))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
