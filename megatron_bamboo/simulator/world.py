"""Time and chance: it passes, nodes come and are taken, and it is kept what the time went into."""

from collections import deque

from megatron_bamboo.planner.plan import PipelinePlan, Plan
from megatron_bamboo.recovery.view import History, View
from megatron_bamboo.simulator.timeline import Kind, Piece, joined
from megatron_bamboo.simulator.trace import Moment, Trace


class Over(Exception):
    """The trace is at its end."""


class World:
    """Who is there at what time, and which of them have a place.

    Args:
        start_seconds: from a node's arrival until it can take a place.
    """

    def __init__(self, trace: Trace, start_seconds: float) -> None:
        self.now = 0.0
        self.plan: Plan | None = None
        self.lost: set[str] = set()
        """Nodes of the plan that are no more."""
        self.awaited: frozenset[str] = frozenset()
        """Nodes beside the plan's without which what is under way is broken off."""
        self.standbys = list(trace.present)
        self.starting: dict[str, float] = {}
        """By node when it can take a place."""
        self._start_seconds = start_seconds
        self._end = trace.seconds
        self._coming = deque(trace.moments)
        self._past: list[float] = []
        self._pieces: list[Piece] = []
        self._epoch = 0

    @property
    def nodes(self) -> list[str]:
        """Those who have a place or can take one."""
        return [*self._running(), *self.standbys]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What the time so far went into."""
        return joined(self._pieces)

    def view(self, step: int, saved_step: int) -> View:
        """What a decision is made from."""
        history = History(0.0, tuple(self._past))
        nodes = tuple(self.standbys), frozenset(self.lost)
        return View(self.plan, history, *nodes, step, saved_step)

    def spend(self, kind: Kind, seconds: float, step: int = 0) -> tuple[float, tuple[str, ...]]:
        """Let so much time pass, or less if needed nodes are lost: how much has, and these nodes.

        Args:
            step: that is trained meanwhile; 0: none is.

        Raises:
            Over: at the end of the trace.
        """
        if self.now >= self._end:
            raise Over
        start, until = self.now, min(self.now + seconds, self._end)
        hit: tuple[str, ...] = ()
        while not hit and self._coming and self._coming[0].seconds <= until:
            moment = self._coming.popleft()
            if hit := self._happen(moment):
                until = moment.seconds
        self._pieces.append(Piece(kind, start, until, step, step))
        self.now = until
        if hit:
            return min(until - start, seconds), hit
        if start + seconds > self._end:
            raise Over
        return seconds, ()

    def wait(self) -> tuple[str, ...]:
        """Until a node can take a place, or one is lost that is needed: these."""
        while not any(due <= self.now for due in self.starting.values()):
            next_moment = [self._coming[0].seconds] if self._coming else []
            until = min([self._end, *self.starting.values(), *next_moment])
            _, hit = self.spend(Kind.WAIT, until - self.now)
            if hit:
                return hit
        return ()

    def admit(self) -> tuple[str, ...]:
        """Those who have started can take a place."""
        ready = tuple(node for node, due in self.starting.items() if due <= self.now)
        for node in ready:
            del self.starting[node]
        self.standbys += ready
        return ready

    def adopt(self, pipelines: tuple[PipelinePlan, ...]) -> None:
        """These pipelines are in force, and who is in none is a standby."""
        nodes = self.nodes
        self._epoch += 1
        self.plan = Plan(self._epoch, pipelines, lost=(), decision=None, reason="simulated")
        self.lost.clear()
        self.standbys = [node for node in nodes if node not in self.plan.nodes]

    def dissolve(self) -> None:
        """Nobody has a place any more."""
        self.standbys, self.plan = self.nodes, None
        self.lost.clear()

    def forget(self, step: int) -> None:
        """What was trained after a step does not count."""
        for place in reversed(range(len(self._pieces))):
            piece = self._pieces[place]
            if piece.kind is Kind.TRAINING:
                if piece.first <= step:
                    break
                self._pieces[place] = Piece(Kind.LOST, piece.start, piece.end)

    def _happen(self, moment: Moment) -> tuple[str, ...]:
        """Nodes come and are taken; those taken that are needed."""
        self._past.append(moment.seconds)
        due = moment.seconds + self._start_seconds
        self.starting |= dict.fromkeys(moment.added, due)
        running = {*self._running()}
        for node in moment.removed:
            self.starting.pop(node, None)
        self.lost |= running & {*moment.removed}
        self.standbys = [node for node in self.standbys if node not in moment.removed]
        return tuple(node for node in moment.removed if node in running | self.awaited)

    def _running(self) -> list[str]:
        """The plan's nodes that live."""
        nodes = () if self.plan is None else self.plan.nodes
        return [node for node in nodes if node not in self.lost]
