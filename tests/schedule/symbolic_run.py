"""A pipeline whose workers run real programs on names instead of tensors.

It keeps what a worker would keep (values that it computed, messages that arrived, gradients that
it added) and loses what a lost worker would lose. It shares no rule with the passes under test.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from random import Random

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Actions, Program, Schedule
from megatron_bamboo.schedule.takeover import Progress, surviving_progress

LOGGED = (Op.F, Op.B, Op.RF, Op.SEND_F, Op.SEND_B, Op.SEND_MIRROR)
MIRRORS_KEPT = 2  # of a chunk


class SymbolicRun:
    def __init__(self, schedule: Schedule, random: Random) -> None:
        self.schedule = schedule
        self.random = random
        ranks = range(len(schedule.programs))
        self.programs: list[Program] = list(schedule.programs)
        self.inbox: list[set[Action]] = [set() for _ in ranks]
        self.values: list[set[Action]] = [set() for _ in ranks]
        self.gradients: list[dict[tuple[int, int], list[int]]] = [{} for _ in ranks]
        self.waiting: list[dict[tuple[int, int], set[int]]] = [{} for _ in ranks]
        self.most_waiting = 0
        self.mirrors: list[dict[Action, list[int]]] = [{} for _ in ranks]
        self.covered: set[Action] = set()
        self.under_way: list[tuple[int, int, Action, list[int]]] = []
        self.history: list[list[Progress]] = [[Progress()] for _ in ranks]
        self.ran: Counter[tuple[int, Action]] = Counter()

    def run(self, num_events: int) -> bool:
        """Random events, at most so many; whether any worker could still go on."""
        for _ in range(num_events):
            events = list(self._possible_events())
            if not events:
                return False
            kind, index = self.random.choice(events)
            if kind == "arrive":
                self._arrive(*self.under_way.pop(index))
            else:
                self._step(index)
        return True

    def run_to_end(self) -> None:
        self.run(10**6)
        stuck = {rank: str(p[0]) for rank, p in enumerate(self.programs) if p}
        assert not stuck, f"deadlock: {stuck}"

    def lose(self, victim: int) -> None:
        """All that is in the victim's memory and in its connections is gone."""
        self.programs[victim] = ()
        self.inbox[victim].clear()
        self.mirrors[victim].clear()
        self.values[victim].clear()
        self.gradients[victim].clear()
        self.waiting[victim].clear()
        self._disconnect(victim)

    def go_on(self, victim: int, views: Mapping[int, Schedule]) -> None:
        """Each survivor goes on with its own program of its own view, what it has done left out."""
        for rank, view in views.items():
            kept = surviving_progress(self.schedule, victim, {rank: self.progress(rank)})
            self.history[rank].append(kept)
            self.programs[rank] = tuple(self._left(view, view.programs[rank], kept.done))
        self._disconnect(victim)
        moved = self.schedule.stages_of(victim)
        self.schedule = next(iter(views.values()))
        for stage in moved:
            for chunk in range(self.schedule.num_chunks):
                self._adopt(stage, chunk)

    def _disconnect(self, victim: int) -> None:
        self.under_way = [m for m in self.under_way if victim not in m[:2]]

    def _left(self, view: Schedule, program: Program, done: Actions) -> Iterator[Action]:
        redundant = {a for a in done if a.op is Op.RF and view.replicas[a.stage] is None}
        finished = done | {a.with_op(Op.F) for a in redundant}
        for action in program:
            taken_by = {Op.RECV_F: Op.F, Op.RECV_B: Op.B}.get(action.op, action.op)
            if action.with_op(taken_by) not in finished:
                yield action

    def progress(self, rank: int) -> Progress:
        return self.history[rank][-1]

    def first_backward(self, stage: int, chunk: int) -> int:
        """The first microbatch whose backward is left to whoever runs a stage."""
        left = (
            action.microbatch
            for action in self.programs[self.schedule.placement[stage]]
            if (action.stage, action.chunk, action.op) == (stage, chunk, Op.B)
        )
        known = (m for m in left if m is not None)
        return min(known, default=self.schedule.num_microbatches)

    def _adopt(self, stage: int, chunk: int) -> None:
        """A shadow whose program does not begin with the first backward must have the rest."""
        if first := self.first_backward(stage, chunk):
            rank = self.schedule.placement[stage]
            mirror = Action(stage, chunk, Op.RECV_MIRROR, first - 1)
            summed = self.mirrors[rank][mirror]
            assert summed == list(range(first)), mirror
            self.gradients[rank][stage, chunk] = list(summed)
            covered = {Action(stage, chunk, op, m) for op in (Op.F, Op.B) for m in summed}
            self.covered |= covered
            last = self.progress(rank)
            self.history[rank].append(Progress(last.done | covered, last.received))

    def _possible_events(self) -> Iterator[tuple[str, int]]:
        for index in range(len(self.under_way)):
            yield "arrive", index
        for rank, program in enumerate(self.programs):
            if program and (program[0].op not in (Op.RECV_F, Op.RECV_B) or self._has(rank)):
                yield "step", rank

    def _has(self, rank: int) -> bool:
        return self.programs[rank][0] in self.inbox[rank]

    def _arrive(self, _sender: int, receiver: int, message: Action, summed: list[int]) -> None:
        inbox, last = self.inbox[receiver], self.progress(receiver)
        inbox.add(message)
        forgotten: set[Action] = set()
        if message.op is Op.RECV_MIRROR:
            self.mirrors[receiver][message] = summed
            place = (message.stage, message.chunk)
            alike = sorted(a for a in self.mirrors[receiver] if (a.stage, a.chunk) == place)
            forgotten = set(alike[:-MIRRORS_KEPT])
            for mirror in forgotten:
                del self.mirrors[receiver][mirror]
        inbox -= forgotten
        self.history[receiver].append(Progress(last.done, last.received - forgotten | {message}))

    def _step(self, rank: int) -> None:
        action, *rest = self.programs[rank]
        self.programs[rank] = tuple(rest)
        match action.op:
            case Op.SEND_F | Op.SEND_B:
                made = action.with_op(Op.F if action.op is Op.SEND_F else Op.B)
                assert made in self.values[rank], action
                self._send(rank, action, [])
            case Op.SEND_MIRROR:
                assert action.chunk is not None and action.microbatch is not None
                summed = self.gradients[rank][action.stage, action.chunk]
                assert summed == list(range(action.microbatch + 1)), f"{action} of {summed}"
                self._send(rank, action, list(summed))
            case Op.F | Op.RF | Op.B:
                self._compute(rank, action)
        if action.op in LOGGED:
            last = self.progress(rank)
            self.history[rank].append(Progress(last.done | {action}, last.received))

    def _send(self, rank: int, send: Action, summed: list[int]) -> None:
        message = self.schedule.receive_of(send)
        where = self.schedule.replicas if summed else self.schedule.placement
        receiver = where[message.stage]
        assert receiver not in (None, rank), send
        self.under_way.append((rank, receiver, message, summed))

    def _compute(self, rank: int, action: Action) -> None:
        self.ran[rank, action] += 1
        values, inbox = self.values[rank], self.inbox[rank]
        if action.op is Op.B:
            assert action.with_op(Op.F) in values, f"{action} without its forward"
            above, receive = self._virtual_neighbour(action, +1), action.with_op(Op.RECV_B)
            has_gradient = above is None or above in values or receive in inbox
            assert has_gradient, f"{action} without its gradient"
            assert action.chunk is not None and action.microbatch is not None
            self._sum(rank, (action.stage, action.chunk), action.microbatch)
        else:
            forward = action.with_op(Op.F)
            below, receive = self._virtual_neighbour(forward, -1), action.with_op(Op.RECV_F)
            has_input = below is None or below in values or receive in inbox
            assert has_input, f"{action} without its input"
        values.add(action.with_op(Op.F) if action.op is Op.RF else action)

    def _sum(self, rank: int, chunk: tuple[int, int], microbatch: int) -> None:
        """Add a gradient, and those that waited for it; or let it wait."""
        summed = self.gradients[rank].setdefault(chunk, [])
        waiting = self.waiting[rank].setdefault(chunk, set())
        waiting.add(microbatch)
        while len(summed) in waiting:
            waiting.remove(len(summed))
            summed.append(len(summed))
        self.most_waiting = max(self.most_waiting, len(waiting))

    def _virtual_neighbour(self, action: Action, distance: int) -> Action | None:
        """The same work at the virtual stage before or after; None beyond the model's ends."""
        num_stages, num_chunks = self.schedule.num_stages, self.schedule.num_chunks
        assert action.chunk is not None
        virtual = action.chunk * num_stages + action.stage + distance
        if not 0 <= virtual < num_stages * num_chunks:
            return None
        chunk, stage = divmod(virtual, num_stages)
        return Action(stage, chunk, action.op, action.microbatch)
