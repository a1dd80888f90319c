"""Counts what a worker's tensors take, by what they are for, and keeps the peak.

Looked at after each action: what there is then, by storage, so that memory which several tensors
share counts once, for the first that has it in the order of the categories.
"""

import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_bamboo.execution.compute import Compute
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.execution.transport import Transport
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.plan import PipelinePlan
from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.footprint import Category, held_by_device


class MemoryAccount:
    """The account of one worker.

    Args:
        on_host: what redundant forwards save is in host memory: the peak is that of the device.
    """

    def __init__(
        self,
        worker: str,
        stages: Mapping[int, Stage],
        compute: Compute,
        transport: Transport,
        on_host: bool,
    ) -> None:
        self._worker = worker
        self._stages = stages
        self._compute = compute
        self._transport = transport
        self._on_host = on_host
        self._peak: Counter[Category] = Counter()
        self._largest: Counter[Category] = Counter()
        self._where = ""

    def look(self, action: Action, pipeline: PipelinePlan, state: StepState) -> None:
        """Count what there is after an action."""
        now = self._count(pipeline, state)
        self._largest |= now
        if held_by_device(now, self._on_host) > held_by_device(self._peak, self._on_host):
            self._peak, self._where = now, f"{action} of step {state.step}"

    def say(self, events: EventLog) -> None:
        """Leave the account in the event log."""
        events.emit(
            "memory",
            at_peak=dict(self._peak),
            largest=dict(self._largest),
            where=self._where,
            resident=_resident_bytes(),
        )

    def _count(self, pipeline: PipelinePlan, state: StepState) -> Counter[Category]:
        seen: dict[StorageWeakRef, Tensor] = {}
        sizes: Counter[Category] = Counter()

        def add(category: Category, tensors: Iterable[Tensor]) -> None:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if (reference := StorageWeakRef(storage)) not in seen:
                    seen[reference] = tensor
                    sizes[category] += storage.nbytes()

        for number, stage in self._stages.items():
            # Where pipelines have just been cut anew, it may be a stage that was not there before.
            is_primary = pipeline.stages[number : number + 1] == (self._worker,)
            for category, tensors in _state_of(stage):
                add(category if is_primary else Category.REPLICA, tensors)
        add(Category.MESSAGES, self._messages(state))
        kept = list(seen.values())
        sizes[Category.ACTIVATIONS] = self._compute.saved.num_bytes(kept)
        sizes[Category.REDUNDANT] = self._compute.saved_redundant.num_bytes(kept)
        sizes[Category.REDUNDANT] += self._compute.host_memory.held_bytes
        return sizes

    def _messages(self, state: StepState) -> Iterator[Tensor]:
        yield from state.outputs.values()
        yield from state.input_gradients.values()
        yield from state.role_gradients.values()
        yield from self._transport.kept()


def _state_of(stage: Stage) -> Iterator[tuple[Category, list[Tensor]]]:
    units = stage.units.values()
    yield Category.PARAMETERS, [p for unit in units for p in unit.parameters]
    yield Category.GRADIENTS, [stage.reduced, *(unit.gradient for unit in units)]
    yield (
        Category.OPTIMIZER,
        [tensor for name, tensor in stage.state() if not name.endswith("/parameter")],
    )


def _resident_bytes() -> int:
    """The most that this process has had of the machine's memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
