"""Where the time of a step goes, in the same words for both sides.

The product's actions are in its event log. Megatron-core calls timers, if its configuration has
some; around them its schedule and optimizer do the rest.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_rank import MegatronRank

from megatron_bamboo.observe.events import read_events
from megatron_bamboo.schedule.actions import RECEIVE_OPS, SEND_OPS, Action, Op

FORWARD, BACKWARD, MESSAGES = "forward", "backward", "messages and waiting for them"
REDUCTION, AGREEMENT = "reduction", "gradient norm and commit"
OPTIMIZER, REST = "clipping and optimizer", "all else"
PARTS = (FORWARD, BACKWARD, MESSAGES, REDUCTION, AGREEMENT, OPTIMIZER, REST)


def parts_of_events(job_dir: Path) -> dict[int, dict[int, dict[str, float]]]:
    """By step and rank, the seconds of each part of the product's steps."""
    spent: dict[int, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for event in read_events(job_dir / "events"):
        if event["event"] == "action":
            part = _part_of(Action.parse(event["action"]).op)
            seconds = event["end"] - event["start"]
            spent[event["step"]][event["rank"]][part] += seconds
    return {step: {rank: dict(c) for rank, c in ranks.items()} for step, ranks in spent.items()}


def _part_of(op: Op) -> str:
    match op:
        case Op.F:
            return FORWARD
        case Op.B:
            return BACKWARD
        case Op.REDUCE | Op.SEND_TIE | Op.TIE:
            return REDUCTION
        case Op.COMMIT:
            return AGREEMENT
        case Op.STEP | Op.GATHER:
            return OPTIMIZER
        case _:
            assert op in RECEIVE_OPS | SEND_OPS, f"{op} in a run without redundancy"
            return MESSAGES


class Stopwatches:
    """Megatron's timers: while an inner one runs the outer one stands still."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._running: list[str] = []
        self._since = 0.0

    @classmethod
    def attach(cls, trained: MegatronRank) -> "Stopwatches":
        """Watch a rank from now on."""
        watches = cls()
        for chunk in trained.model:
            chunk.config.timers = watches
        optimizer = trained.optimizer
        optimizer.get_grad_norm = watches._around(AGREEMENT, optimizer.get_grad_norm)
        optimizer.step = watches._around(OPTIMIZER, optimizer.step)
        return watches

    def take(self) -> dict[str, float]:
        """Seconds by part since the last time."""
        spent, self._spent = dict(self._spent), Counter()
        return spent

    def __call__(self, name: str, log_level: int = 0) -> "_Stopwatch":
        """Megatron's way to ask for a timer."""
        return _Stopwatch(self, _part_of_timer(name))

    def enter(self, part: str) -> None:
        """This part begins, in the middle of another one or not."""
        self._charge()
        self._running.append(part)

    def leave(self) -> None:
        """The part that began last is over."""
        self._charge()
        self._running.pop()

    def _charge(self) -> None:
        now = time.monotonic()
        if self._running:
            self._spent[self._running[-1]] += now - self._since
        self._since = now

    def _around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            self.enter(part)
            try:
                return function(*args)
            finally:
                self.leave()

        return timed


class _Stopwatch:
    """One timer, as Megatron uses it."""

    def __init__(self, watches: Stopwatches, part: str) -> None:
        self._watches = watches
        self._part = part

    def start(self, barrier: bool = False) -> None:
        self._watches.enter(self._part)

    def stop(self) -> None:
        self._watches.leave()


def _part_of_timer(name: str) -> str:
    match name:
        case "forward-compute":
            return FORWARD
        case "backward-compute":
            return BACKWARD
        case _ if "send" in name or "recv" in name:
            return MESSAGES
        case _ if name.endswith(("grads-sync", "grads-all-reduce")):
            return REDUCTION
        case _:
            return REST


def mean_parts(steps: Iterable[dict[str, float]], step_seconds: float) -> dict[str, float]:
    """The mean of each part; what no part accounts for is all else."""
    counted = list(steps)
    mean = {part: sum(s.get(part, 0.0) for s in counted) / len(counted) for part in PARTS}
    mean[REST] = step_seconds - sum(mean[part] for part in PARTS if part != REST)
    return mean
