"""``bamboo rehearse``: what does this training survive, and is it the same in the end?

A campaign runs the training again and again, each time with some faults at moments drawn by lot,
until so many have struck, and judges every run by its event log and against a run without faults.
It goes on where it was ended; the same seed draws the same faults.
"""

import argparse
import shlex
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, pairwise
from pathlib import Path

from rich.console import Console

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.errors import UserError
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.rehearsal.draw import (
    KINDS,
    VERIFIED_KINDS,
    Drawn,
    Lottery,
    OnCoordinator,
)
from megatron_bamboo.rehearsal.fault import How
from megatron_bamboo.rehearsal.invariants import complaints
from megatron_bamboo.rehearsal.launch import Training
from megatron_bamboo.rehearsal.networks import why_not
from megatron_bamboo.rehearsal.results import Ending, Results, RunResult, code_digest
from megatron_bamboo.rehearsal.table import last_line, table

UNDISTURBED = "undisturbed"
STEPS_TO_HEAL = 12
FOREIGN_FLAGS = ("--save", "--job-dir", "--inject")
FRUITLESS_RUNS = 5
"""After so many runs in which nothing struck, nothing ever will."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo rehearse``; what follows the script is the script's."""
    add = parser.add_argument
    add("--losses", type=int, required=True, metavar="N", help="faults that must strike in all")
    add("--seed", type=int, default=1, metavar="S", help="draws the faults (1)")
    add("--nodes", type=int, required=True, metavar="N", help="nodes to start")
    add("--workers-per-node", type=int, default=1, metavar="N", help="as of bamboo run")
    add("--standbys", type=int, default=0, metavar="N", help="as of bamboo run")
    add("--respawn", type=float, metavar="SECONDS", help="as of bamboo run")
    add("--fork-workers", action="store_true", help="as of bamboo run")
    add(
        "--kinds",
        metavar="KIND,..",
        help=f"what happens (all: {', '.join(KINDS)}; and {How.FLIP}, if copies are compared; "
        f"{How.CUT} only as root)",
    )
    add("--jobs", type=int, default=1, metavar="N", help="runs at the same time (1)")
    add("--per-run", type=int, default=4, metavar="N", help="faults of a run, at most (4)")
    add(
        "--apart",
        type=int,
        default=STEPS_TO_HEAL,
        metavar="STEPS",
        help=f"iterations after which a job has healed ({STEPS_TO_HEAL})",
    )
    add(
        "--deadline",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="a run that takes longer hangs (900)",
    )
    add("--dir", type=Path, metavar="DIR", help="folder of the campaign (runs/rehearsal-SEED)")
    add("script", help="the training script, like pretrain_gpt_bamboo.py")
    add("script_args", nargs=argparse.REMAINDER, help="the script's own options")


def run(args: argparse.Namespace) -> int:
    """Rehearse; 0 if enough has struck and every run was as it must be, else 1."""
    campaign = Campaign(args)
    campaign.run()
    console = Console()
    console.print(table(campaign.results))
    console.print(last_line(campaign.results, args.losses), highlight=False)
    return 0 if campaign.is_good else 1


class Campaign:
    """Runs under faults, in one folder.

    Raises:
        UserError: for options that cannot be.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._verified_every = _verified_every(args.script_args)
        why_no_cut = why_not()
        self._kinds = _kinds(args.kinds, self._verified_every > 0, why_no_cut)
        _check(args)
        self._args = args
        self._folder: Path = (args.dir or Path("runs") / f"rehearsal-{args.seed}").absolute()
        nodes = {"--nodes": args.nodes, "--workers-per-node": args.workers_per_node}
        forks = ("--fork-workers",) if args.fork_workers else ()
        spare = {"--standbys": args.standbys, "--respawn": args.respawn}
        command = (args.script, *args.script_args)
        self._must_end = threading.Event()
        self._training = Training(
            (*_words(nodes), *forks), _words(spare), command, args.deadline, self._must_end
        )
        settings: dict[str, object] = {
            "options": self._training.options,
            "spare": self._training.spare,
            "command": command,
            "seed": args.seed,
            "kinds": list(self._kinds),
            "per_run": args.per_run,
            "apart": args.apart,
            "code": code_digest(),
        }
        self._kept = Results(self._folder, settings)
        self.results = self._kept.read()
        self._console = Console()
        if args.kinds is None and why_no_cut is not None:
            self._say(f"without {How.CUT}: {why_no_cut}")

    def run(self) -> None:
        """Go on until so many faults have struck."""
        shape = self._undisturbed()
        args = self._args
        spare = (args.standbys, args.respawn is not None)
        lottery = Lottery(
            shape, self._kinds, args.per_run, args.apart, *spare, self._verified_every
        )
        known = {result.number for result in self.results}
        numbers = (number for number in count(1) if number not in known)
        running: set[Future[RunResult]] = set()
        with ThreadPoolExecutor(args.jobs) as pool:
            try:
                while running or self._wants_more:
                    while self._wants_more and len(running) < args.jobs:
                        number = next(numbers)
                        drawn = lottery.run(args.seed, number)
                        running.add(pool.submit(self._rehearse, number, drawn))
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    self.results += [future.result() for future in done]
            finally:
                self._must_end.set()
        self.results.sort(key=lambda result: result.number)

    @property
    def is_good(self) -> bool:
        """Whether enough has struck, and no run was broken by it."""
        return self._has_enough and all(r.ending is not Ending.BROKEN for r in self.results)

    @property
    def _wants_more(self) -> bool:
        """Whether another run is to be begun, now that those so far have ended."""
        last = self.results[-FRUITLESS_RUNS:]
        is_fruitless = len(last) == FRUITLESS_RUNS and not any(one.strikes for one in last)
        return not self._has_enough and not is_fruitless

    @property
    def _has_enough(self) -> bool:
        return sum(len(result.strikes) for result in self.results) >= self._args.losses

    def _undisturbed(self) -> JobShape:
        """The shape of the job; once, a run of it without faults is made to compare with."""
        folder = self._folder / UNDISTURBED
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            self._say("a run without faults and replicas, to compare with")
            record = self._training.run_undisturbed(folder)
            if found := complaints(record, record.job_dir):
                raise UserError("the training fails without any fault:\n" + "\n".join(found))
            (folder / "complete").touch()
        shape = JobShape.read(folder / "job")
        if any(pipeline.num_stages == 1 for pipeline in shape.arrangement.pipelines):
            raise UserError("a pipeline of one stage has no shadows: there is nothing to rehearse")
        if shape.policy != PolicyName.BAMBOO:
            raise UserError(
                f"under --bamboo-policy {shape.policy} losses change the last bits, by which runs "
                "are compared here: leave it out"
            )
        return shape

    def _rehearse(self, number: int, drawn: Drawn) -> RunResult:
        folder = self._folder / f"run{number}"
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        record = self._training.run(folder, drawn)
        found = complaints(record, self._folder / UNDISTURBED / "job")
        result = RunResult.of(number, drawn, record, found, time.monotonic() - began)
        self._kept.add(result)
        self._tell(result, drawn, folder)
        if not found:
            shutil.rmtree(folder)
        return result

    def _tell(self, result: RunResult, drawn: Drawn, folder: Path) -> None:
        faults = ", ".join(f"{strike.node} {strike.how}" for strike in result.strikes)
        self._say(f"run {result.number}: {faults or 'nothing struck'}: {result.ending}")
        if result.ending is Ending.BROKEN:
            self._say("\n".join(result.complaints))
            command = shlex.join(["bamboo", "run", *self._training.words(drawn)])
            self._say(f"kept in {folder}; again: {command}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _words(options: Mapping[str, object]) -> tuple[str, ...]:
    given = {name: value for name, value in options.items() if value is not None}
    return tuple(word for name, value in given.items() for word in (name, str(value)))


def _verified_every(script_args: Sequence[str]) -> int:
    """In how many steps the training compares copies of its state once; 0 for never."""
    flag, every = "--bamboo-verify-replicas", "0"
    for word, value in pairwise((*script_args, "")):
        if word == flag:
            every = value
        elif word.startswith(f"{flag}="):
            every = word.partition("=")[2]
    return int(every) if every.isdecimal() else 0


def _kinds(
    text: str | None, is_verified: bool, why_no_cut: str | None
) -> tuple[How | OnCoordinator, ...]:
    if text is None:
        kinds = VERIFIED_KINDS if is_verified else KINDS
        return tuple(kind for kind in kinds if kind is not How.CUT or why_no_cut is None)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in words if word not in VERIFIED_KINDS]:
        raise UserError(f"--kinds {unknown[0]}: the kinds are {', '.join(VERIFIED_KINDS)}")
    if not words:
        raise UserError("--kinds: name at least one kind")
    if How.FLIP in words and not is_verified:
        raise UserError(
            f"--kinds {How.FLIP}: a bit that flips is found only where copies are compared: add "
            "--bamboo-verify-replicas N to the script's flags"
        )
    if How.CUT in words and why_no_cut is not None:
        raise UserError(f"--kinds {How.CUT}: {why_no_cut}")
    return tuple(kind for word in words for kind in VERIFIED_KINDS if kind == word)


def _check(args: argparse.Namespace) -> None:
    for name in ("losses", "per_run", "apart", "jobs"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or above")
    if not args.deadline > 0:
        raise UserError("--deadline must be above 0 seconds")
    if not Path(args.script).is_file():
        raise UserError(f"there is no script {args.script}")
    for flag in FOREIGN_FLAGS:
        if any(word == flag or word.startswith(f"{flag}=") for word in args.script_args):
            raise UserError(
                f"leave out {flag}: a rehearsal trains the same again and again, and keeps nothing"
            )
