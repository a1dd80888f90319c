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
    mended: set[str] = field(default_factory=set)
    """The units that this worker has got since."""


class Verification:
    """One worker's part in comparing copies of the state.

    Args:
        stages: all that this worker holds.
        every: in how many steps it is done once; 0 for never.
        shared: the pipelines share the optimizer's state.
    """

    def __init__(
        self,
        worker: str,
        tensor_rank: int,
        stages: Mapping[int, Stage],
        layout: DigestLayout,
        registry: GroupRegistry,
        events: EventLog,
        every: int,
        shared: bool,
    ) -> None:
        self._worker = worker
        self._tensor_rank = tensor_rank
        self._stages = stages
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
        differences = find_differences(self._layout.read(slots), self._plan, self._shared)
        self._findings = _Findings(step, self._plan, differences)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What the newest step's comparison has shown."""
        return self._findings.differences

    def stages_to_mend(self, plan: Plan) -> tuple[int, ...]:
        """The stages of which this worker is to give or get some unit's right state, under the plan
        in force."""
        return tuple(sorted({self._stage_of(mend, plan) for mend in self._mends(plan)}))

    def members(self, stage: int, plan: Plan) -> tuple[str, ...]:
        """Who takes part in mending a stage, with whatever state."""
        mends = (mend for mend in self._mends(plan) if self._stage_of(mend, plan) == stage)
        return tuple(dict.fromkeys(worker for mend in mends for worker in mend.members))

    def mend(self, stage: int, plan: Plan) -> None:
        """Give the right state of a stage's units to who has another, or get it; it can be done
        again.

        All do so in one order of the units, wherever their pipelines are cut.

        Raises:
            PeerLost: another holder did not take part.
            TrainingError: nobody is left who has it, and what this worker has must not be used.
        """
        for mend in self._mends(plan):
            if self._stage_of(mend, plan) == stage:
                self._mend_unit(mend, stage, plan)

    def _mend_unit(self, mend: Mend, stage: int, plan: Plan) -> None:
        held = self._stages[stage]
        if mend.source is None:
            self._refuse_unless_mended(mend, stage)
            return
        name = f"mend/{self._findings.step}/{mend.unit}/{mend.source}"
        self._registry.add(name, mend.members, plan.epoch)
        group = self._registry.get(name)
        assert group is not None, f"{name} has one member"
        if mend.source == self._worker:
            group.share([pack(held, NO_COUNTERS, mend.unit)])
            return
        size, device = num_bytes(held, mend.unit), held.reduced.device
        packed = torch.empty(size, dtype=torch.uint8, device=device)
        group.share([packed])
        unpack(held, packed, mend.unit)
        self._findings.mended.add(mend.unit)
        self._events.emit(
            "mended",
            unit=mend.unit,
            stage=stage,
            source_of_state=mend.source,
            step=self._findings.step,
            epoch=plan.epoch,
        )

    def _stage_of(self, mend: Mend, plan: Plan) -> int:
        """The stage of this worker's pipeline that a unit belongs to."""
        return plan.pipelines[plan.pipeline_of(self._worker)].shape.stage_of(mend.unit)

    def _mends(self, plan: Plan) -> tuple[Mend, ...]:
        """Those that this worker takes part in, in the order of the units."""
        found = self._findings
        if found.verified is None:
            return ()
        own = [d for d in found.differences if d.copy.tensor_rank == self._tensor_rank]
        mends = plan_mends(own, found.verified, plan, self._shared)
        return tuple(mend for mend in mends if self._worker in mend.members)

    def _refuse_unless_mended(self, mend: Mend, stage: int) -> None:
        if mend.unit in self._findings.mended:
            return
        kinds = dict.fromkeys(d.copy.kind for d in self.differences if d.copy.unit == mend.unit)
        what = f"{mend.unit} ({', '.join(kinds)})"
        raise TrainingError(
            f"stage {stage} on {node_of(self._worker)} differed in {what} before step "
            f"{self._findings.step} from a copy that is lost now, and is not to be trusted: start "
            "again from a checkpoint"
        )
