"""Compares the copies of the state that a worker's stages have, and mends those that differ.

The digests travel in the commit vector, so that all know of a difference or nobody, whatever is
lost meanwhile. What follows from it each worker works out for itself, under any later plan too
(``planner/trust.py``). Mending comes after the step, like the gather of parameters: nobody's right
state changes before all have entered the next commit, and who had to be mended enters it only then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_bamboo.execution.commit import DigestLayout
from megatron_bamboo.execution.errors import TrainingError
from megatron_bamboo.execution.registry import GroupRegistry
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.model.digest import state_digests
from megatron_bamboo.model.moving import NO_COUNTERS, num_bytes, pack, unpack
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.trust import Copy, Difference, Mend, find_differences, plan_mends


@dataclass(slots=True)
class _Findings:
    """What the newest comparison has shown, until the next step."""

    step: int = 0
    verified: Plan | None = None
    """By which the copies had their holders."""
    differences: tuple[Difference, ...] = ()
    mended: set[int] = field(default_factory=set)
    """The stages of this worker that it has got since."""


class Verification:
    """One worker's part in comparing copies of the state.

    Args:
        stages: all that this worker holds.
        stages_of_units: by unit the stage that it belongs to.
        every: in how many steps it is done once; 0 for never.
        shared: the pipelines share the optimizer's state.
    """

    def __init__(
        self,
        worker: str,
        tensor_rank: int,
        stages: Mapping[int, Stage],
        stages_of_units: Mapping[str, int],
        layout: DigestLayout,
        registry: GroupRegistry,
        events: EventLog,
        every: int,
        shared: bool,
    ) -> None:
        self._worker = worker
        self._tensor_rank = tensor_rank
        self._stages = stages
        self._stages_of_units = stages_of_units
        self._layout = layout
        self._registry = registry
        self._events = events
        self._every = every
        self._shared = shared
        self._digests: dict[Copy, int] = {}
        self._plan: Plan | None = None
        self._findings = _Findings()

    def is_due(self, step: int) -> bool:
        """Whether copies are compared in a step."""
        return self._every > 0 and step % self._every == 0

    def make_digests(self, plan: Plan) -> None:
        """Look at all that this worker holds under a plan, as it is before the step."""
        number = plan.pipeline_of(self._worker)
        pipeline = plan.pipelines[number]
        self._plan, self._digests = plan, {}
        for is_replica, holders in ((False, pipeline.stages), (True, pipeline.replicas)):
            for stage, holder in enumerate(holders):
                if holder == self._worker:
                    self._digests |= {
                        Copy(unit, self._tensor_rank, kind, number, is_replica): digest
                        for (unit, kind), digest in state_digests(self._stages[stage]).items()
                    }

    def slots(self, step: int) -> list[float]:
        """What this worker adds to a step's commit vector."""
        return self._layout.fill(self._digests) if self.is_due(step) else []

    def judge(self, step: int, slots: Sequence[float]) -> None:
        """Learn from a step's commit vector what differs."""
        self._findings = _Findings(step)
        if not self.is_due(step):
            return
        assert self._plan is not None, f"step {step} was committed without a comparison"
        differences = find_differences(
            self._layout.read(slots), self._plan, self._stages_of_units, self._shared
        )
        self._findings = _Findings(step, self._plan, differences)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What the newest step's comparison has shown."""
        return self._findings.differences

    def stages_to_mend(self, plan: Plan) -> tuple[int, ...]:
        """The stages whose right state this worker is to give or get, under the plan in force."""
        return tuple(mend.stage for mend in self._mends(plan))

    def members(self, stage: int, plan: Plan) -> tuple[str, ...]:
        """Who takes part in mending a stage, with whatever state."""
        return next((mend.members for mend in self._mends(plan) if mend.stage == stage), ())

    def mend(self, stage: int, plan: Plan) -> None:
        """Give a stage's right state to who has another, or get it; it can be done again.

        Raises:
            PeerLost: another holder did not take part.
            TrainingError: nobody is left who has it, and what this worker has must not be used.
        """
        mend = next(mend for mend in self._mends(plan) if mend.stage == stage)
        held = self._stages[stage]
        if mend.source is None:
            self._refuse_unless_mended(mend)
            return
        name = f"mend/{self._findings.step}/{stage}/{mend.source}"
        self._registry.add(name, mend.members, plan.epoch)
        group = self._registry.get(name)
        assert group is not None, f"{name} has one member"
        if mend.source == self._worker:
            group.share([pack(held, NO_COUNTERS)])
            return
        like = held.reduced
        packed = torch.empty(num_bytes(held), dtype=torch.uint8, device=like.device)
        group.share([packed])
        unpack(held, packed)
        self._findings.mended.add(stage)
        step = self._findings.step
        self._events.emit(
            "mended", stage=stage, source_of_state=mend.source, step=step, epoch=plan.epoch
        )

    def _mends(self, plan: Plan) -> tuple[Mend, ...]:
        """Those that this worker takes part in, by stage."""
        found = self._findings
        if found.verified is None:
            return ()
        own = [d for d in found.differences if d.copy.tensor_rank == self._tensor_rank]
        mends = plan_mends(own, found.verified, plan, self._shared)
        return tuple(mend for mend in mends if self._worker in mend.members)

    def _refuse_unless_mended(self, mend: Mend) -> None:
        if mend.stage in self._findings.mended:
            return
        found = [d for d in self.differences if d.stage == mend.stage]
        units = ", ".join(dict.fromkeys(f"{d.copy.unit} ({d.copy.kind})" for d in found))
        raise TrainingError(
            f"stage {mend.stage} on {node_of(self._worker)} differed in {units} before step "
            f"{self._findings.step} from a copy that is lost now, and is not to be trusted: start "
            "again from a checkpoint"
        )
