"""Orders the work of a worker that has several streams of it, as a shadow has after a takeover.

Each stream keeps its own order. Between streams the work goes first that the longest chain of
other work waits for: with backwards first, or the moved stage first, a shadow that took over the
first stage would redo its backwards, for which nobody waits, before its own, for which all wait.
The orders come from one simulation of all workers, so that they cannot deadlock together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise
from types import MappingProxyType

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.schedule.dependencies import Dependencies
from megatron_bamboo.schedule.play import Streams, play
from megatron_bamboo.schedule.schedule import Actions, Program, Schedule

# The order has to be good for any costs near these. With the true ones of unequal stages simulated
# takeovers were shorter by only half a percent of an iteration.
_COSTS = EQUAL_COSTS

Graph = Mapping[Action, Iterable[Action]]


def merge_streams(
    schedule: Schedule,
    streams_by_rank: Sequence[Streams],
    received: Actions,
    turns: Mapping[Action, Action] = MappingProxyType({}),
) -> tuple[Program, ...]:
    """One program a rank, of computation only, for the schedule's placement.

    Args:
        turns: by action of one stream one of another that must come before it.
    """
    joined = tuple(tuple(action for stream in own for action in stream) for own in streams_by_rank)
    dependencies = Dependencies(replace(schedule, programs=joined), received)
    inputs = {a: dependencies.needs_here(a) for program in joined for a in program}
    inputs |= {action: (*inputs[action], before) for action, before in turns.items()}
    urgency = _urgency(inputs, streams_by_rank)
    rows = play(streams_by_rank, inputs, _COSTS.of, urgency=urgency)
    programs = tuple(tuple(timed.action for timed in row) for row in rows)
    assert list(map(len, programs)) == list(map(len, joined)), "the streams deadlock"
    return programs


def _urgency(inputs: Graph, streams_by_rank: Sequence[Streams]) -> Mapping[Action, float]:
    """The time from an action's start to the end of the longest chain that waits for it."""
    before = {action: set(needs) for action, needs in inputs.items()}
    for streams in streams_by_rank:
        for stream in streams:
            for first, second in pairwise(stream):
                before[second].add(first)
    urgency = {action: _COSTS.of(action) for action in before}
    for action in reversed(tuple(TopologicalSorter(before).static_order())):
        for need in before[action]:
            urgency[need] = max(urgency[need], _COSTS.of(need) + urgency[action])
    return urgency
