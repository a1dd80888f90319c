"""An evaluation under one plan: the forwards of one pipeline, one global batch after the other.

Its messages go by channels of its own, which end with the attempt: nothing of it can be mistaken
for what a training step sends, or another attempt. A worker begins a global batch when its pipeline
has told what the one before has reported. So all messages of that have arrived, what is under way
has names that tell it apart, and no stage runs ahead of the others further than that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_bamboo.data.replay import ReplayedIterator
from megatron_bamboo.evaluation.due import Evaluation
from megatron_bamboo.evaluation.outcome import Weighed
from megatron_bamboo.execution.errors import EpochEnded, PeerLost
from megatron_bamboo.execution.evaluation_data import EvaluationData
from megatron_bamboo.execution.evaluation_store import (
    EvaluationStore,
    Share,
    batch_key,
    begin_key,
)
from megatron_bamboo.execution.forwards import Forwards
from megatron_bamboo.execution.groups import Group
from megatron_bamboo.execution.mailbox import Mailbox, Message
from megatron_bamboo.execution.parts import Parts
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.reported import losses_of
from megatron_bamboo.execution.transport import Expected, TensorShape, Transport
from megatron_bamboo.membership.place import EVALUATE
from megatron_bamboo.membership.waits import Waiting
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.forward_only import forward_only_schedule
from megatron_bamboo.schedule.generate import compute_schedule

_KIND = "evaluation"
"""Tells how long an action may take from how long one of training may."""


@dataclass(frozen=True, slots=True)
class EvaluatorParts:
    """What evaluations are made of beside what steps are made of."""

    parts: Parts
    view: PipelineView
    tensor_rank: int
    mailbox: Mailbox
    store: EvaluationStore
    forwards: Forwards
    data: EvaluationData
    activation: Callable[[], TensorShape]
    """What a message looks like."""
    shaped: Callable[[Group], Group]
    """A group as the emulated link has it, if there is one."""
    before: Callable[[Action, int, int], None]
    """Fault injection: before an action of a global batch, counted from 1, after a step."""

    @property
    def tells(self) -> bool:
        """Whether this worker says what its pipeline has come to."""
        return self.view.runs_last_stage() and self.tensor_rank == 0


class Attempt:
    """One worker's part in an evaluation as long as one plan is in force.

    Args:
        must_leave: whether a new plan waits.
    """

    def __init__(
        self,
        own: EvaluatorParts,
        evaluation: Evaluation,
        epoch: int,
        must_leave: Callable[[], bool],
    ) -> None:
        view = own.view
        self._own, self._parts, self._view = own, own.parts, view
        self._evaluation, self._epoch, self._must_leave = evaluation, epoch, must_leave
        shape = view.shape
        sizes = (shape.num_stages, shape.num_chunks, shape.num_microbatches)
        self._schedule = forward_only_schedule(compute_schedule(*sizes), view.pipeline.placement())
        self._program = self._schedule.programs[view.rank]
        num_restores = own.store.num_restores()
        self._share = Share(view.arrangement.microbatches, view.number, num_restores)
        self._transport = Transport(own.mailbox, self._make_pair)
        self._microbatches = ReplayedIterator(iter(()))
        self._outputs: dict[Action, Tensor] = {}
        self._losses: dict[int, dict[str, Weighed]] = {}

    def run(self) -> None:
        """Run what this pipeline has not reported yet; return when it has reported all.

        Raises:
            EpochEnded: a new plan waits, or the outcome is known without this attempt.
            DeadlineExceeded: a wait was over, and nobody said that the peer is lost.
        """
        first = self._first_batch()
        peers = sorted({self._peer_of(action) for action in self._program if action.op is not Op.F})
        self._own.mailbox.clear()
        for peer in peers:
            members = tuple(sorted((peer, self._parts.worker)))
            self._parts.registry.add(self._name_of_pair(peer), members, self._epoch)
        self._transport.connect(peers)
        try:
            with self._own.forwards.evaluating(self._schedule.stages_of(self._view.rank)):
                for batch in range(first, self._evaluation.num_batches):
                    self._run_batch(batch)
        except EpochEnded:
            self._leave(peers)
            raise
        self._leave(peers)

    def _first_batch(self) -> int:
        """The first global batch that this pipeline has not reported, the same for all of it."""
        store, asked = self._own.store, (self._evaluation, self._epoch, self._share)
        if self._own.tells:
            store.tell_begin(*asked)
        else:
            self._await(begin_key(*asked), f"the begin of {self._evaluation}", self._must_go)
        first = store.first_batch(*asked)
        self._log("evaluation_begun", first_batch=first)
        return first

    def _run_batch(self, batch: int) -> None:
        step, data = self._evaluation.step, self._own.data
        numbers = self._view.arrangement.global_microbatches(self._view.number)
        self._microbatches = ReplayedIterator(data.microbatches(self._evaluation, batch, numbers))
        self._transport.expect(self._expected())
        for action in self._program:
            if self._must_leave():
                raise EpochEnded
            self._own.before(action, batch + 1, step)
            self._perform(action, batch)
        reports = {numbers[microbatch]: losses for microbatch, losses in self._losses.items()}
        self._losses = {}
        if self._own.tells:
            self._own.store.report(self._evaluation, self._share, batch, reports)
        else:
            key = batch_key(self._evaluation, self._share, batch)
            self._await(key, f"batch {batch} of {self._evaluation}", self._must_leave)
        self._transport.finish_step(step)
        self._transport.forget_sent()

    def _expected(self) -> Iterator[Expected]:
        shape = self._own.activation()
        for action in self._program:
            if action.op is Op.RECV_F:
                message = Message(self._evaluation.step, action)
                yield Expected(message, self._peer_of(action), shape)

    def _perform(self, action: Action, batch: int) -> None:
        match action.op:
            case Op.RECV_F:
                self._receive(action)
            case Op.SEND_F:
                output = self._outputs.pop(action.with_op(Op.F))
                message = Message(self._evaluation.step, self._schedule.receive_of(action))
                self._transport.send(self._peer_of(action), message, output)
            case _:
                self._forward(action, batch)

    def _receive(self, action: Action) -> None:
        peer, step = self._peer_of(action), self._evaluation.step
        waiting = Waiting((peer,), self._transport.sent())
        with self._parts.where.at(step, str(action), peer, _kind_of(action), waiting):
            self._take(action, self._parts.wait_seconds)

    def _forward(self, action: Action, batch: int) -> None:
        assert action.microbatch is not None
        step, what = self._evaluation.step, f"{action} in {self._evaluation}"
        if (turnstile := self._parts.turnstile) is not None:
            with self._parts.where.at(step, EVALUATE, "the other workers of its node"):
                name = f"{what}, batch {batch} in epoch {self._epoch}"
                turnstile.pass_together(name, self._must_leave)
        with self._parts.where.at(step, f"{action} in the evaluation", kind=_kind_of(action)):
            inputs = self._input(action)
            output, reported = self._own.forwards.run(
                action, self._schedule, inputs, self._microbatches
            )
        if self._schedule.downstream(action, Op.F) is None:
            self._losses[action.microbatch] = losses_of(reported)
        else:
            self._outputs[action] = output.detach().contiguous()

    def _input(self, forward: Action) -> Tensor | None:
        producer = self._schedule.upstream(forward, Op.F)
        if producer is None:
            return None  # data
        if self._schedule.placement[producer.stage] == self._view.rank:
            return self._outputs.pop(producer)
        return self._take(forward.with_op(Op.RECV_F), 0.0)

    def _take(self, receive: Action, seconds: float) -> Tensor:
        message, peer = Message(self._evaluation.step, receive), self._peer_of(receive)
        return self._own.mailbox.take(message, seconds, self._must_leave, peer)

    def _must_go(self) -> bool:
        """Whether a new plan waits, or the one that would tell the begin need not come any more.

        It may have known the outcome before it knew of this plan.
        """
        return self._must_leave() or self._own.store.outcome(self._evaluation) is not None

    def _await(self, key: str, what: str, must_leave: Callable[[], bool]) -> None:
        """Wait until the worker of the pipeline's last stage has told something."""
        last, seconds = self._view.pipeline.stages[-1], self._parts.wait_seconds
        words = f"{what} in epoch {self._epoch}, from {last},"
        with self._parts.where.at(self._evaluation.step, EVALUATE, last):
            self._own.store.await_key(key, seconds, must_leave, words)

    def _peer_of(self, action: Action) -> str:
        """Who sends or receives a message."""
        other = self._schedule.receive_of if action.op is Op.SEND_F else self._schedule.send_of
        return self._view.pipeline.stages[other(action).stage]

    def _name_of_pair(self, peer: str) -> str:
        pair = "+".join(sorted((peer, self._parts.worker)))
        return f"evaluation/{self._evaluation.key}/{pair}"

    def _make_pair(self, peer: str) -> Group:
        group = self._parts.registry.get(self._name_of_pair(peer))
        if group is None:  # the attempt has ended meanwhile
            raise PeerLost((peer,), "making a group", None)
        return self._own.shaped(group)

    def _leave(self, peers: list[str]) -> None:
        """Leave the channels; what is still under way in them is of no use to anybody."""
        self._transport.drop(peers)
        self._parts.registry.end([self._name_of_pair(peer) for peer in peers])

    def _log(self, event: str, **more: Any) -> None:
        evaluation = self._evaluation
        self._parts.events.emit(
            event,
            step=evaluation.step,
            kind=evaluation.kind,
            pipeline=self._view.number,
            epoch=self._epoch,
            **more,
        )


def _kind_of(action: Action) -> object:
    return (_KIND, action.op, action.stage, action.chunk)
