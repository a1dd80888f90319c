"""What a finished job must show: read from its folder, said in words where it does not.

Every check returns complaints, so that the tests and the sweep say the same about a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forked_jobs import FinishedJob, last_words
from tiny_gpt import Shape

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.membership.workers import node_of, workers_of
from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.rehearsal.record import Events, said_steps
from megatron_bamboo.rehearsal.work import work_complaints

# A step passes, the next one is under way when that is said, in the one after it state moves.
STEPS_TO_HEAL = 4
# It takes a tenth of this on a quiet machine. In the jobs here the steps may pass sooner.
SECONDS_TO_HEAL = 1.0
# Everything that a run may leave. A checkpoint folder is not among it.
JOB_FOLDER = {"job.json", "losses.jsonl", "events", "logs", "state"}
JOB_FOLDER |= {"secret", "outcome.json"}


@dataclass(frozen=True, slots=True)
class Expected:
    """What was done to a job."""

    shape: Shape
    redundancy: str
    victims: Sequence[str]
    joined: Mapping[str, str] = field(default_factory=dict)
    """By standby the victim whose place it took."""
    knows_takeovers: bool = True
    """Whether who takes over what follows from the victims alone, and not from what was healed."""

    def place(self, node: str) -> tuple[int, int]:
        """The pipeline of a node, and the stage that it began with."""
        while node in self.joined:
            node = self.joined[node]
        return self.shape.place(node)


def complaints(job: FinishedJob, expected: Expected, undisturbed: Path) -> list[str]:
    """Everything that is not as it must be after a loss that was survived."""
    if job.result.status != 0:
        return [f"status {job.result.status}: {job.result.message}\n{last_words(job.request)}"]
    checks: list[Callable[[FinishedJob, Expected], Iterator[str]]] = [
        _losses,
        _iteration_lines,
        _folder,
        _processes,
        _takeovers,
        _state_files,
        _protection,
    ]
    found = [text for check in checks for text in check(job, expected)]
    found += work_complaints(Events.read(job.job_dir), JobShape.read(job.job_dir))
    return [*found, *_differences(job, undisturbed)]


def _losses(job: FinishedJob, expected: Expected) -> Iterator[str]:
    lost = sorted(node for node, _cause in job.result.lost)
    if lost != sorted(expected.victims):
        yield f"lost are {job.result.lost}, not {expected.victims}"


def _iteration_lines(job: FinishedJob, expected: Expected) -> Iterator[str]:
    steps = said_steps(job.result.lines)
    if steps != list(range(1, expected.shape.num_steps + 1)):
        yield f"iteration lines of steps {steps}"


def _folder(job: FinishedJob, expected: Expected) -> Iterator[str]:
    store = "store.url" if job.request.store else "store.sqlite"
    if (found := {path.name for path in job.job_dir.iterdir()}) != JOB_FOLDER | {store}:
        yield f"the job folder holds {sorted(found)}"


def _processes(job: FinishedJob, expected: Expected) -> Iterator[str]:
    """Survivors end as the very process that they started as; nothing is left."""
    if job.result.left_behind:
        yield f"left behind: {job.result.left_behind}"
    notes = job.identities()
    workers = {(e["worker"], e["pid"]) for e in job.events("worker_started") if "agent" in e}
    nodes = [f"node{number}" for number in range(expected.shape.num_nodes)] + [*expected.joined]
    for node in workers_of(nodes, expected.shape.tensor_size):
        own = {
            event: [(e["pid"], e["start_ticks"]) for e in notes
                    if (e["event"], e["source"]) == (event, node)]
            for event in ("started", "ended")
        }  # fmt: skip
        ended = [] if node_of(node) in expected.victims else own["started"]
        if len(own["started"]) != 1 or own["ended"] != ended:
            yield f"{node} started as {own['started']} and ended as {own['ended']}"
        if [pid for name, pid in workers if name == node] != [pid for pid, _ in own["started"]]:
            yield f"{node} is not the one process that its agent started: {sorted(workers)}"


def _takeovers(job: FinishedJob, expected: Expected) -> Iterator[str]:
    """Each victim's stage is taken over once, by its predecessor in the ring."""
    if not expected.knows_takeovers:
        return
    wanted = []
    for victim in expected.victims:
        pipeline, stage = expected.place(victim)
        shadow = expected.shape.node(pipeline, (stage - 1) % expected.shape.stages[pipeline])
        wanted.append((victim, shadow, pipeline, stage))
    found = [
        (node_of(e["victim"]), node_of(e["shadow"]), e["pipeline"], e["stage"])
        for e in job.events("takeover")
    ]
    wanted *= expected.shape.tensor_size
    if sorted(found) != sorted(wanted):
        yield f"takeovers {found}, not {wanted}"


def _state_files(job: FinishedJob, expected: Expected) -> Iterator[str]:
    """Every live holder has written what it holds, as the last plan has it."""
    (end,) = job.events("finished_job")
    size = expected.shape.tensor_size
    roles = {"primary": "stages", "replica": "replicas"}
    wanted = sorted(
        f"{worker}-stage{stage}-{role}.safetensors"
        for pipeline in end["pipelines"]
        for role, field in roles.items()
        for stage, node in enumerate(pipeline[field])
        if node is not None
        for worker in workers_of([node], size)
    )
    found = sorted(path.name for path in (job.job_dir / "state").iterdir())
    if found != wanted:
        yield f"state files {found}, not {wanted}"


def _protection(job: FinishedJob, expected: Expected) -> Iterator[str]:
    """Each stage has a replica again in the end, where there was something to heal in."""
    if not 0 <= (alone := _num_unprotected(job, expected)) <= _most_unprotected(job, expected):
        yield f"{alone} stages were left with one holder"


def _num_unprotected(job: FinishedJob, expected: Expected) -> int:
    """How many stages one node alone holds in the end."""
    (end,) = job.events("finished_job")
    replicas = [node for pipeline in end["pipelines"] for node in pipeline["replicas"]]
    wanted = 0 if expected.redundancy == "none" else expected.shape.num_nodes
    return wanted - sum(node is not None for node in replicas)


def _most_unprotected(job: FinishedJob, expected: Expected) -> int:
    """How many of them there may be."""
    if not job.events("takeover"):
        return 0
    excused = _cannot_heal(job, expected) or _had_no_time(job)
    return 2 * len(expected.victims) if excused else 0


def _cannot_heal(job: FinishedJob, expected: Expected) -> bool:
    """Whether the last loss came when no step was left to heal in, or left a node alone."""
    last = max(event["step"] for event in job.events("takeover"))
    left = min(expected.shape.stages) - len(expected.victims)
    return bool(last > expected.shape.num_steps - STEPS_TO_HEAL or left < 2)


def ended_too_soon(job: FinishedJob, expected: Expected) -> bool:
    """Whether a good job shows nothing about healing, since its steps passed too fast for it."""
    if job.result.status != 0 or _num_unprotected(job, expected) <= 0:
        return False
    return _had_no_time(job) and not _cannot_heal(job, expected)


def _had_no_time(job: FinishedJob) -> bool:
    (end,) = job.events("finished_job")
    lost_at = [event["time"] for event in job.events("takeover")]
    return bool(lost_at) and end["time"] - max(lost_at) < SECONDS_TO_HEAL


def _differences(job: FinishedJob, undisturbed: Path) -> Iterator[str]:
    comparison = compare_runs(undisturbed, job.job_dir)
    if not comparison.equal:
        yield format_comparison(comparison)
