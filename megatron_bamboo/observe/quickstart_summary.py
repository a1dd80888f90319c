"""The quickstart's last line: what was lost, what it cost, and whether anything differs.

``python -m megatron_bamboo.observe.quickstart_summary UNDISTURBED DISTURBED --seconds N`` reads
two finished job folders and prints one JSON object. The pause is the longest time from just before
a SIGKILL to the shadow's first forward or backward of the victim's stage, in iterations of median
length: how long the pipeline stood still, whatever the size of the model.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron_bamboo.errors import UserError
from megatron_bamboo.observe.compare import compare_runs
from megatron_bamboo.observe.events import read_events
from megatron_bamboo.observe.saved_run import open_run
from megatron_bamboo.schedule.actions import Action, Op

EVENTS_FOLDER = "events"

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """What the quickstart shows."""

    iterations: int
    nodes_lost: int
    takeovers: int
    checkpoint_restores: int
    losses_equal: bool
    parameters_equal: bool
    pause_iterations: float
    seconds: int

    @property
    def as_promised(self) -> bool:
        """A node was lost, its shadow took over, and no bit differs."""
        happened = self.nodes_lost > 0 and self.takeovers > 0 and self.checkpoint_restores == 0
        return happened and self.losses_equal and self.parameters_equal


def summarize(undisturbed: Path, disturbed: Path, seconds: int) -> Summary:
    """Compare the two runs and read the disturbed one's events."""
    comparison = compare_runs(undisturbed, disturbed)
    events = read_events(disturbed / EVENTS_FOLDER)
    return Summary(
        iterations=len(open_run(disturbed).losses),
        nodes_lost=len({event["node"] for event in events if event["event"] == "loss"}),
        takeovers=len(_of_kind(events, "takeover")),
        checkpoint_restores=len(_of_kind(events, "restore")),
        losses_equal=comparison.losses_equal,
        parameters_equal=comparison.parameters_equal,
        pause_iterations=round(longest_pause_seconds(events) / iteration_seconds(events), 3),
        seconds=seconds,
    )


def iteration_seconds(events: Sequence[Event]) -> float:
    """The median time from the start of one iteration to the start of the next."""
    starts: dict[int, float] = {}
    for event in _of_kind(events, "action"):
        starts[event["step"]] = min(event["start"], starts.get(event["step"], event["start"]))
    if len(starts) < 2:
        raise UserError("the event log holds fewer than two iterations")
    ordered = [starts[step] for step in sorted(starts)]
    return median(after - before for before, after in pairwise(ordered))


def longest_pause_seconds(events: Sequence[Event]) -> float:
    """The longest time from a kill until somebody computes in the victim's place."""
    kills = _of_kind(events, "fault")
    if not kills:
        raise UserError("the event log holds no injected fault")
    return max(_pause_seconds(events, kill) for kill in kills)


def _pause_seconds(events: Sequence[Event], kill: Event) -> float:
    computed = [event for event in _of_kind(events, "action") if _is_compute(event)]
    own = [event for event in computed if event["source"] == kill["source"]]
    if not own:
        raise UserError(f"{kill['source']} was killed before it computed anything")
    stages = {Action.parse(event["action"]).stage for event in own}
    taken_over = [
        event["start"]
        for event in computed
        if event["start"] > kill["time"]
        and event["source"] != kill["source"]
        and event["pipeline"] == own[0]["pipeline"]
        and Action.parse(event["action"]).stage in stages
    ]
    if not taken_over:
        raise UserError(f"nobody computed in the place of {kill['source']}")
    return float(min(taken_over) - kill["time"])


def _is_compute(event: Event) -> bool:
    return Action.parse(event["action"]).op in (Op.F, Op.B)


def _of_kind(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary; 0 if all is as promised, 1 if anything differs, 2 for unusable input."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_bamboo.observe.quickstart_summary",
        description="Summarize an undisturbed and a disturbed run as one JSON object.",
    )
    parser.add_argument("undisturbed", type=Path)
    parser.add_argument("disturbed", type=Path)
    parser.add_argument("--seconds", type=int, required=True, help="how long it all took")
    args = parser.parse_args(argv)
    try:
        summary = summarize(args.undisturbed, args.disturbed, args.seconds)
    except UserError as error:
        sys.stderr.write(f"quickstart: {error}\n")
        return 2
    print(json.dumps(asdict(summary)))
    return 0 if summary.as_promised else 1


if __name__ == "__main__":
    sys.exit(main())
