"""What must hold of runs in which the batch was shared out anew: all but the order of sums."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from forked_jobs import FinishedJob, last_words
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.data.samples import samples_of_step
from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.observe.saved_run import open_run
from megatron_bamboo.rehearsal.record import said_steps

# With Adam's usual epsilon gradients that are nothing but rounding would make whole steps.
FLAGS = ("--adam-eps", "1e-3")
SECONDS = 400.0
MOST_IN_LOSSES, MOST_IN_TENSORS = 1e-5, 1e-5
_UNDISTURBED: dict[tuple[int, Shape], Path] = {}


def run(
    scenarios: ScenarioRunner,
    shape: Shape,
    redundancy: str,
    *faults: str,
    num_standbys: int = 0,
    more_flags: Sequence[str] = (),
) -> FinishedJob:
    """A job whose microbatches may change, with all the time that a busy machine needs."""
    flags = (*FLAGS, "--bamboo-policy", "auto", *more_flags) if faults else FLAGS
    return scenarios.start(
        shape, redundancy, *faults, more_flags=flags, num_standbys=num_standbys
    ).finish(SECONDS)


def undisturbed(scenarios: ScenarioRunner, shape: Shape) -> Path:
    """The job folder of a run of the same training that lost nothing; made once."""
    shape = replace(shape, num_mirrors=0)
    key = (id(scenarios), shape)
    if key not in _UNDISTURBED:
        job = run(scenarios, shape, "none")
        assert job.result.status == 0, job.result.message
        _UNDISTURBED[key] = job.job_dir
    return _UNDISTURBED[key]


def complaints(job: FinishedJob, shape: Shape, victims: Sequence[str], whole: Path) -> list[str]:
    """What is not as it must be.

    Args:
        whole: the job folder of the undisturbed run.
    """
    if job.result.status != 0:
        return [f"status {job.result.status}: {job.result.message}\n{last_words(job.request)}"]
    lost = sorted(node for node, _cause in job.result.lost)
    found = [f"lost are {lost}"] * (lost != sorted(victims))
    if (steps := said_steps(job.result.lines)) != list(range(1, shape.num_steps + 1)):
        found.append(f"iteration lines of steps {steps}")
    if job.result.left_behind:
        found.append(f"left behind: {job.result.left_behind}")
    return [*found, *_samples(job, shape), *_differences(job, whole)]


def _samples(job: FinishedJob, shape: Shape) -> Iterator[str]:
    """The newest attempt at each step reads each sample of it for one place alone [1]."""
    events = job.events("samples")
    newest: dict[int, int] = {}
    for event in events:
        newest[event["step"]] = max(newest.get(event["step"], 0), event["attempt"])
    read: dict[int, set[tuple[int, ...]]] = {}
    for e in events:
        if e["attempt"] == newest[e["step"]]:
            place = (e["pipeline"], e["microbatch"], *e["samples"])
            read.setdefault(e["step"], set()).add(place)
    for step in range(1, shape.num_steps + 1):
        samples = sorted(sample for _, _, *some in read[step] for sample in some)
        if samples != list(samples_of_step(step - 1, shape.total_microbatches)):
            yield f"step {step} has samples {samples}"


def _differences(job: FinishedJob, whole: Path) -> Iterator[str]:
    lost, undisturbed = open_run(job.job_dir).losses, open_run(whole).losses
    for step, values in lost.items():
        for one, other in zip(_numbers(values), _numbers(undisturbed[step]), strict=True):
            if abs(one - other) > MOST_IN_LOSSES * abs(other):
                yield f"step {step} has {values}, not {undisturbed[step]}"
    comparison = compare_runs(whole, job.job_dir)
    if comparison.copies or any(d.max_abs > MOST_IN_TENSORS for d in comparison.tensors):
        yield format_comparison(comparison)


def _numbers(values: tuple[str, str]) -> list[float]:
    return [float.fromhex(value) for value in values]
