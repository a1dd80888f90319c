"""A worker's checkpoints, as its loop over steps sees them: go on from one, save when it is due."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_bamboo.agent.environment import WorkerEnvironment
from megatron_bamboo.checkpoint.child import Failure
from megatron_bamboo.checkpoint.common import Fingerprint, common_state, read_counters
from megatron_bamboo.checkpoint.folder import step_folder
from megatron_bamboo.checkpoint.moments import BeforeMoment
from megatron_bamboo.checkpoint.saving import Follower, Saved, Saver, SaverParts
from megatron_bamboo.checkpoint.state import LOAD_ERRORS, load_stage, sharded_state
from megatron_bamboo.config import Options
from megatron_bamboo.execution.errors import TrainingError
from megatron_bamboo.execution.injection import save_injector
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.model.precision import LossScale
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.plan import Checkpoint


class Checkpoints:
    """Goes on from a checkpoint, and saves.

    Args:
        args: the options as a checkpoint holds them.
        fingerprint: tells the order of the first samples.
        events: where outcomes are logged.
    """

    def __init__(
        self,
        options: Options,
        args: Namespace,
        environment: WorkerEnvironment,
        client: StoreClient,
        stages: Mapping[int, Stage],
        scheduler: OptimizerParamScheduler,
        loss_scale: LossScale,
        fingerprint: Fingerprint,
        events: EventLog,
    ) -> None:
        self._options = options.checkpoint
        self._args = args
        self._environment = environment
        self._stages = stages
        self._scheduler = scheduler
        self._loss_scale = loss_scale
        self._fingerprint = fingerprint
        self._events = events
        self._saver: Saver | None = None
        if options.checkpoint.save is not None:
            parts = SaverParts(
                root=Path(options.checkpoint.save),
                worker=environment.worker,
                tensor_size=environment.tensor_size,
                client=client,
                store=environment.store,
                credential=environment.credential,
                attempt_seconds=60 * options.parallel.distributed_timeout_minutes,
                sharded=any(stage.shard.count > 1 for stage in stages.values()),
                state_of=self._state_of,
                make_before=self._make_before,
            )
            self._saver = Saver(parts)

    def load(self, start: Checkpoint) -> int:
        """Put the state of the step that the run starts from in place; that step, or 0.

        Every holder of a stage reads it for itself, whether it runs or shadows it.

        Raises:
            TrainingError: what is there cannot be read.
        """
        step = start.step
        if step > 0:
            assert start.folder is not None
            folder = step_folder(Path(start.folder), step)
            try:
                counters = read_counters(folder)
                for stage in self._stages.values():
                    load_stage(stage, str(folder), counters.num_applied)
            except LOAD_ERRORS as error:
                reason = f"step {step} cannot be loaded from {folder}: {Failure.of(error).reason}"
                raise TrainingError(f"{reason}; name another step with --ckpt-step") from error
            self._scheduler.step(counters.num_applied * self._args.global_batch_size)
            self._loss_scale.load(torch.tensor(counters.loss_scale, dtype=torch.float64))
            self._events.emit("loaded", step=step, folder=str(folder))
        return step

    def save_if_due(
        self, step: int, follower: Follower, is_last: bool, waits: bool = False
    ) -> None:
        """Save after a step if it is time to; after the last one, whichever that is, it is, and
        after one after which all wait.

        A checkpoint that cannot be written stops no training, since none is needed but to start
        again: the next one may work. After the last step there is no next one.

        Raises:
            TrainingError: the state after the last step could not be saved.
        """
        interval = self._options.save_interval
        is_due = is_last or waits or (interval is not None and step % interval == 0)
        if self._saver is None or not is_due:
            return
        saved = self._saver.save(step, follower)
        self._log(saved)
        if saved.failure is not None and is_last:
            raise TrainingError(
                f"the training is done, but step {step} was not saved to {saved.folder}: "
                f"{saved.failure}"
            )

    def _state_of(self, step: int, stages: Sequence[int], shares: Sequence[int]) -> dict[str, Any]:
        loss_scale = self._loss_scale.state().tolist()
        common = common_state(
            self._args, step, self._scheduler.state_dict(), loss_scale, self._fingerprint
        )
        whole, shared = ([self._stages[number] for number in some] for some in (stages, shares))
        return common | sharded_state(whole, shared)

    def _make_before(self) -> BeforeMoment:
        environment = self._environment
        events = EventLog(environment.job_dir / "events", environment.worker)
        return save_injector(environment.inject, events)

    def _log(self, saved: Saved) -> None:
        self._events.emit("saved", step=saved.step, epoch=saved.epoch, failure=saved.failure)
