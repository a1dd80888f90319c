"""What must hold of every run, whatever struck it: each check says in words where it does not.

The numbers in brackets are those of the invariants in ``docs/design.md``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.data.samples import samples_of_step
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.rehearsal.fault import How
from megatron_bamboo.rehearsal.leaks import leak_complaints
from megatron_bamboo.rehearsal.record import Event, Events, RunRecord, said_steps
from megatron_bamboo.rehearsal.work import work_complaints

Check = Callable[[RunRecord], Iterator[str]]
Pipeline = Mapping[str, Any]
"""As an event has it."""


def complaints(run: RunRecord, undisturbed: Path) -> list[str]:
    """Everything that is not as it must be.

    Args:
        undisturbed: the job folder of a run of the same training that lost nothing.
    """
    found = [text for check in ALWAYS for text in check(run)]
    if run.status == Status.NO_HOLDER:
        return [*found, *_no_holder_without_reason(run)]
    if run.status != Status.FINISHED:
        return [*found, f"it ended with status {run.status}: {' | '.join(run.lines[-3:])}"]
    found += [text for check in WHEN_FINISHED for text in check(run)]
    comparison = compare_runs(undisturbed, run.job_dir)
    return found if comparison.equal else [*found, format_comparison(comparison)]


def _iteration_lines(run: RunRecord) -> Iterator[str]:
    """Each step is said once, in order, up to the end or to where the job could not go on."""
    steps, first = said_steps(run.lines), run.shape.start_step + 1
    last = run.shape.train_iters if run.status == Status.FINISHED else first + len(steps) - 1
    if steps != list(range(first, last + 1)):
        yield f"iteration lines of steps {steps}"


def _samples(run: RunRecord) -> Iterator[str]:
    """The microbatches of each step hold each sample of its global batch once [1]."""
    read: dict[tuple[int, int, int], list[int]] = {}
    for event in run.events.of("samples"):
        place = (event["step"], event["pipeline"], event["microbatch"])
        if read.setdefault(place, event["samples"]) != event["samples"]:
            yield f"step {place[0]}, microbatch {place[2]} of pipeline {place[1]} was read as other"
    by_step: dict[int, list[int]] = {step: [] for step in said_steps(run.lines)}
    for (step, _, _), samples in read.items():
        if step in by_step:
            by_step[step] += samples
    for step, samples in by_step.items():
        if sorted(samples) != list(samples_of_step(step - 1, run.shape.global_batch_size)):
            yield f"step {step} has samples {sorted(samples)}"


def _plans(run: RunRecord) -> Iterator[str]:
    """Whoever knows the plan of an epoch knows the same one, as the store has it [7]."""
    digests = {epoch: set(seen) for epoch, seen in run.plans.items()}
    for event in run.events.of("plan"):
        digests.setdefault(event["epoch"], set()).add(event["digest"])
    for epoch, found in digests.items():
        if len(found) > 1:
            yield f"there are {len(found)} plans of epoch {epoch}"


def _losses(run: RunRecord) -> Iterator[str]:
    """Every lost node was struck, and every node that was struck is lost."""
    struck, lost = _struck(run.events), {event["node"] for event in run.events.of("loss")}
    for node in sorted(lost - struck.keys()):
        yield f"{node} was lost though nothing struck it"
    if run.status != Status.FINISHED:
        return
    for node in sorted(struck.keys() - lost):
        yield f"{node} was struck ({struck[node]['fault']}) and never counted as lost"


def _flips(run: RunRecord) -> Iterator[str]:
    """A bit that flipped was found and mended in the same step; nothing else ever differed."""
    flips = [(node_of(e["source"]), e) for e in run.events.of("fault") if e["how"] == How.FLIP]
    mended = {(node_of(event["source"]), event["step"]) for event in run.events.of("mended")}
    for node, flip in flips:
        if (node, flip["step"]) not in mended and run.status == Status.FINISHED:
            yield f"a bit flipped in {node} ({flip['fault']}) and was not mended"
    steps = {flip["step"] for _, flip in flips}
    for event in run.events.of("difference"):
        if event["step"] not in steps:
            yield f"before step {event['step']} {event['what']}, though no bit flipped then"


def _left_behind(run: RunRecord) -> Iterator[str]:
    if run.left_behind:
        yield f"left behind: {', '.join(run.left_behind)}"


def _work(run: RunRecord) -> Iterator[str]:
    yield from work_complaints(run.events, run.shape)


def _leaks(run: RunRecord) -> Iterator[str]:
    """What a worker holds of its machine while the job is whole does not grow with the losses."""
    yield from leak_complaints(run.events, run.shape.group_timeout_seconds)


def _no_holder_without_reason(run: RunRecord) -> Iterator[str]:
    """A job may give up only if nobody has some stage any more, or nobody can take it [5]."""
    lost = {event["node"] for event in run.events.of("loss")}
    plans = [event for event in run.events.of("plan") if "pipelines" in event]
    pipelines, held = _holders(sorted([*plans, *run.events.of("changed")], key=_time))
    missing = [place for place, nodes in held.items() if nodes <= lost]
    if not missing:
        yield f"no stage had lost all its holders: {run.lines[-1:]}"
    elif run.shape.num_shards == 1 and not any(
        lost.issuperset(pipelines[number]["ranks"])  # its standbys may have been too few
        or _all_copies(pipelines, held, number, stage) <= lost
        for number, stage in missing
    ):
        yield f"others had all that was lost: {run.lines[-1:]}"


def _time(event: Event) -> float:
    return float(event["time"])


def _holders(arranged: Sequence[Event]) -> tuple[list[Pipeline], dict[tuple[int, int], set[str]]]:
    """The newest pipelines, and by pipeline and stage who has its state for sure.

    What a node is to get in a step that is begun anew it has only once that has passed.
    """
    newest = arranged[-1]
    known = next(
        event
        for event in reversed(arranged)
        if event.get("redone") is None or event["redone"] != newest.get("redone")
    )
    held = {
        (number, stage): _pair(pipeline, stage) & _pair(before, stage)
        for number, (pipeline, before) in enumerate(
            zip(newest["pipelines"], known["pipelines"], strict=True)
        )
        for stage in range(len(pipeline["stages"]))
    }
    return newest["pipelines"], held


def _pair(pipeline: Pipeline, stage: int) -> set[str]:
    return {pipeline["stages"][stage], pipeline["replicas"][stage]} - {None}


def _all_copies(
    pipelines: Sequence[Pipeline], held: Mapping[tuple[int, int], set[str]], number: int, stage: int
) -> set[str]:
    """Who has what a stage of a pipeline holds, in whatever pipeline that is cut like it."""
    spans = pipelines[number]["shape"]["spans"]
    alike = [n for n, pipeline in enumerate(pipelines) if pipeline["shape"]["spans"] == spans]
    return {node for other in alike for node in held.get((other, stage), ())}


def _struck(events: Events) -> dict[str, Event]:
    """By node the fault that was to cost it."""
    faults = (event for event in events.of("fault") if event["how"] != How.FLIP)
    return {node_of(event["source"]): event for event in faults}


ALWAYS: tuple[Check, ...] = (_iteration_lines, _samples, _plans, _losses, _flips, _left_behind)
WHEN_FINISHED: tuple[Check, ...] = (_work, _leaks)
