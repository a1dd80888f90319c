"""Lets nodes go that are to be taken, or whose user wants them back.

They are noticed, by their agents or by ``bamboo drain``. What they run and hold moves in a planned
change; after it the others train without them. One that has handed over ends as soon as nobody can
need anything of it: when a step has passed without it, or the epoch in which it took part is over.
"""

from megatron_bamboo.agent.ending import Standby
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.replacer import Replacer
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.membership.leaving import (
    DRAINED,
    GOING,
    NOTICED,
    RELEASED,
    REMARK,
    STAYS,
    Notice,
)
from megatron_bamboo.membership.table import Table
from megatron_bamboo.planner.draining import can_go
from megatron_bamboo.planner.plan import Plan

TOLD = "told/"
"""By node the notice that was told last."""


class Drainer:
    """Who is to leave, who is going, and who may end."""

    def __init__(
        self, members: Members, replacer: Replacer, table: Table, reporter: Reporter
    ) -> None:
        self._members = members
        self._replacer = replacer
        self._table = table
        self._reporter = reporter

    def going(self) -> set[str]:
        """The nodes that have handed over and are needed still, or were when they were lost."""
        return {
            node
            for node in self._under(GOING)
            if self._table.get(f"{RELEASED}{node}") is None
            and self._table.get(f"{DRAINED}{node}") is None
        }

    def look(self, plan: Plan) -> None:
        """Say what is new, and end the standbys that are to leave."""
        for node, notice in self._notices().items():
            self._say(node, notice)
            if not notice.is_over and self._is_idle(node, plan):
                self._members.dismiss(node)
        for node, text in self._under(REMARK).items():
            remark = text.decode()
            self._reporter.once(f"{REMARK}{node}/{remark}", f"{node}: {remark}")
        for node, cause in self._members.drained.items():
            self._reporter.once(f"{DRAINED}{node}", f"drained {node} ({cause})")

    def look_before_start(self) -> None:
        """The same while an open job waits for its first nodes: others come in their place."""
        if not self._members.is_open:
            return
        for node, notice in self._notices().items():
            self._say(node, notice)
            if not notice.is_over:
                self._members.dismiss(node)

    def due(self, plan: Plan) -> tuple[tuple[str, ...], tuple[Standby, ...]]:
        """The nodes that can be let go now, the most urgent ones first, and the standbys that take
        their places."""
        if plan.change is not None or not (leaving := self._leaving(plan)):
            return (), ()
        found = self._replacer.look(plan, leaving)
        able = [node for node in leaving if node not in found.waiting]
        going = can_go(plan, able, found.ready)
        for node in set(able) - set(going):
            self._say_waiting(node, plan)
        return going, found.ready

    def say_they_stay(self, plan: Plan, why: str) -> None:
        """Say why nobody can be let go any more."""
        for node in self._leaving(plan):
            if self._table.get(f"{STAYS}{node}") != why.encode():
                self._table.set(f"{STAYS}{node}", why.encode())
            self._reporter.once(f"stays/{node}/{why}", f"{node} stays: {why}")

    def let_go(self, before: Plan, after: Plan, step: int) -> None:
        """A change was made in a step: take note of those who are in no place after it."""
        for node in sorted(set(before.nodes) - set(after.nodes) - self._members.lost.keys()):
            self._table.set(f"{GOING}{node}", f"{before.epoch} {step}".encode())

    def dismiss(self, epoch: int, plan: Plan) -> None:
        """Let the live nodes of dissolved pipelines go, which took part in an epoch that is over;
        their machines stay, so each can be a standby in its next life, but for those of which there
        is other word."""
        cause = "its pipeline is dissolved" if plan.restored is None else "it has no place"
        for node in plan.dismissed:
            if not self._members.is_leaving(node):
                notice = Notice(cause, is_over=True)
                self._table.set(f"{NOTICED}{node}", notice.to_json().encode())
            self._table.set(f"{GOING}{node}", f"{epoch} 0".encode())

    def release(self, epoch: int, step: int) -> None:
        """Let those end whom nobody needs any more.

        Args:
            epoch: the one in force.
            step: the newest that has passed. One after that in which a node took part last has
                passed only if nobody waits in that one any more.
        """
        for node in self.going():
            last_epoch, last_step = map(int, (self._table.get(f"{GOING}{node}") or b"").split())
            if epoch <= last_epoch and step <= last_step:
                continue
            if node in self._members.lost:
                self._table.delete(f"{GOING}{node}")
            else:
                self._members.release(node)

    def _is_idle(self, node: str, plan: Plan) -> bool:
        """Whether a node is a standby that was not given any place."""
        is_free = node in self._members.waiting_standbys() and node not in plan.nodes
        return is_free and self._table.get(f"{GOING}{node}") is None

    def _say(self, node: str, notice: Notice) -> None:
        """Say a notice when it has changed."""
        key, value = f"{TOLD}{node}", notice.to_json().encode()
        if self._table.get(key) != value:
            self._replacer.noticed(node)
            with self._table.together():
                self._table.set(key, value)
                verb = "stays" if notice.is_over else "is to leave"
                self._reporter.note(f"{node} {verb} ({notice})")

    def _say_waiting(self, node: str, plan: Plan) -> None:
        held = [
            f"stage {stage} of pipeline {number}"
            for number, pipeline in enumerate(plan.pipelines)
            for stage, runner in enumerate(pipeline.stages)
            if runner == node
        ]
        self._reporter.once(
            f"waits/{node}/{plan.epoch}",
            f"{node} waits for a standby: it is the last node that could run {', '.join(held)}",
        )

    def _leaving(self, plan: Plan) -> dict[str, Notice]:
        """The notices of nodes of a plan that are to leave, the most urgent ones first."""
        notices = {n: notice for n, notice in self._notices().items() if n in plan.nodes}
        urgent = sorted(
            (notice.seconds is None, notice.seconds or 0.0, node)
            for node, notice in notices.items()
            if not notice.is_over and node not in self._members.lost
        )
        return {node: notices[node] for *_, node in urgent}

    def _notices(self) -> dict[str, Notice]:
        """By node that is there, or was until it was lost, the newest word, oldest first."""
        notices = {}
        for node, text in self._under(NOTICED).items():
            if self._members.has_joined(node) and node not in self._members.drained:
                notices[node] = Notice.from_json(text)
        return notices

    def _under(self, prefix: str) -> dict[str, bytes]:
        return {k.removeprefix(prefix): v for k, v in self._table.items(prefix).items()}
