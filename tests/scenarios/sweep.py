"""Kill a node at every moment: ``python tests/scenarios/sweep.py --part full``.

Results are kept by moment and by the code they were had with, so that a sweep that was ended goes
on where it was, and one of changed code starts anew. The folders of failed runs are kept.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from forked_jobs import ROOT
from moments import PARTS, Moment, moments_of
from moving import MovingMoment, moving_moments
from scenario_runner import ScenarioRunner

from megatron_bamboo.rehearsal.results import code_digest

AnyMoment = Moment | MovingMoment
MOVING = "moving"
"""The part of the step in which state moves."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one moment."""

    moment: str
    code: str
    seconds: float
    complaints: tuple[str, ...]


class Results:
    """The results file: one JSON line a moment."""

    def __init__(self, path: Path, code: str) -> None:
        self._path = path
        self._code = code
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, moment: AnyMoment, seconds: float, complaints: Sequence[str]) -> None:
        """Append a result."""
        line = {"moment": str(moment), "code": self._code, "seconds": round(seconds, 3)}
        with self._path.open("a") as file:
            file.write(json.dumps(line | {"complaints": list(complaints)}) + "\n")

    def read(self) -> dict[str, Result]:
        """The newest result of each moment with this code."""
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        found = [json.loads(line) for line in lines]
        return {
            values["moment"]: Result(**values | {"complaints": tuple(values["complaints"])})
            for values in found
            if values["code"] == self._code
        }


def without_good_result(moments: Sequence[AnyMoment], results: Results) -> list[AnyMoment]:
    """What is still to be run."""
    good = {name for name, result in results.read().items() if not result.complaints}
    return [moment for moment in moments if str(moment) not in good]


def sweep(
    moments: Sequence[AnyMoment], results: Results, runner: ScenarioRunner, num_jobs: int
) -> Iterator[str]:
    """Run these moments; yields what to say."""
    for shape in sorted({moment.shape for moment in moments}, key=str):
        runner.undisturbed(shape)
    with ThreadPoolExecutor(num_jobs) as pool:
        futures = {pool.submit(_timed, runner, moment): moment for moment in moments}
        for number, future in enumerate(as_completed(futures), start=1):
            seconds, complaints = future.result()
            results.add(futures[future], seconds, complaints)
            if complaints:
                yield f"FAILED {futures[future]}\n" + "\n".join(complaints)
            elif number % 25 == 0:
                yield f"{number} of {len(moments)}"


def _timed(runner: ScenarioRunner, moment: AnyMoment) -> tuple[float, list[str]]:
    start = time.monotonic()
    try:
        complaints = runner.survive_moment(moment)
    except (TimeoutError, RuntimeError) as error:
        complaints = [str(error)]
    return time.monotonic() - start, complaints


def verdict(moments: Sequence[AnyMoment], results: Results) -> tuple[str, bool]:
    """What was planned, run and failed, and whether all was run and nothing failed."""
    done = results.read()
    run = [done[str(moment)] for moment in moments if str(moment) in done]
    failed = [result for result in run if result.complaints]
    text = f"planned {len(moments)} run {len(run)} failed {len(failed)}"
    return text, len(run) == len(moments) and not failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part; 0 if every planned moment was run and none failed."""
    parser = argparse.ArgumentParser(
        prog="python tests/scenarios/sweep.py",
        description="Kill a node at every moment and compare each run with an undisturbed one.",
    )
    parser.add_argument("--part", choices=(*PARTS, MOVING), required=True, help="which moments")
    parser.add_argument("--results", type=Path, help="file (default: runs/sweep-PART.jsonl)")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time (default: 1)")
    args = parser.parse_args(argv)
    moments = _planned(args.part)
    path = args.results or ROOT / "runs" / f"sweep-{args.part}.jsonl"
    results = Results(path, code_digest(Path(__file__).parent))
    left = without_good_result(moments, results)
    _say(f"planned {len(moments)}, of which {len(moments) - len(left)} were run before")
    if left:
        _run(left, results, args.jobs)
    text, is_good = verdict(moments, results)
    _say(text)
    return 0 if is_good else 1


def _planned(part: str) -> Sequence[AnyMoment]:
    return moving_moments() if part == MOVING else moments_of(part)


def _run(moments: Sequence[AnyMoment], results: Results, num_jobs: int) -> None:
    runner = ScenarioRunner(Path(tempfile.mkdtemp(prefix="bamboo-sweep-")))
    try:
        for text in sweep(moments, results, runner, num_jobs):
            _say(text)
    finally:
        runner.close()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
