"""One worker: everything that it is made of, wired together, and what it does in a step.

The only place where all parts meet; the loop over steps is the script's (``hook.py``). Megatron's
imports are quiet because ``training.py`` comes first.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron_bamboo.agent.environment import WorkerEnvironment
from megatron_bamboo.checkpoint.checkpoints import Checkpoints
from megatron_bamboo.checkpoint.common import plain_args
from megatron_bamboo.config import Layout, Options, ReplicaMemory, costs_of
from megatron_bamboo.config.emulation import EMULATED
from megatron_bamboo.data.fingerprint import fingerprint
from megatron_bamboo.execution.accounting import MemoryAccount
from megatron_bamboo.execution.commit import (
    CommitLayout,
    DigestLayout,
    to_hex,
    unit_parts,
)
from megatron_bamboo.execution.compute import Compute
from megatron_bamboo.execution.epochs import EpochWatch, Handlers
from megatron_bamboo.execution.errors import PeerLost
from megatron_bamboo.execution.evaluation_attempt import EvaluatorParts
from megatron_bamboo.execution.evaluation_data import EvaluationData
from megatron_bamboo.execution.evaluation_store import EvaluationStore
from megatron_bamboo.execution.evaluator import Evaluator
from megatron_bamboo.execution.executor import Executor
from megatron_bamboo.execution.forwards import Forwards
from megatron_bamboo.execution.groups import Group
from megatron_bamboo.execution.handover import UnitHandover
from megatron_bamboo.execution.held_stages import HeldStages, Holding
from megatron_bamboo.execution.injection import Injector
from megatron_bamboo.execution.last_gather import await_gathers
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.execution.local_groups import make_tensor_group, model_groups
from megatron_bamboo.execution.mailbox import Mailbox
from megatron_bamboo.execution.mirrors import Mirrors
from megatron_bamboo.execution.parts import Parts, Shapes, shapes_of
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.registry import GroupRegistry, pair_group
from megatron_bamboo.execution.reports import StepReporter
from megatron_bamboo.execution.script_groups import ScriptGroups, make_script_groups
from megatron_bamboo.execution.shaped_link import Link, ShapedGroup
from megatron_bamboo.execution.step_data import StepData
from megatron_bamboo.execution.tail import Tail
from megatron_bamboo.execution.transport import Transport
from megatron_bamboo.execution.turnstile import Turnstile, share_memory
from megatron_bamboo.execution.verification import Verification
from megatron_bamboo.execution.whereabouts import Whereabouts
from megatron_bamboo.membership.assignment import Assignment
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.place import FINISH, HOLD, LEAVE, LOOP, SAVE, START
from megatron_bamboo.membership.raised import Raised, tell_raised
from megatron_bamboo.membership.restores import GoBack
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.membership.torch_store import BambooStore
from megatron_bamboo.model.emulated import DEVICE
from megatron_bamboo.model.gpt import Recipe, prepare_process
from megatron_bamboo.model.optimizer_state import make_moments
from megatron_bamboo.model.place import set_current_stage
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.model.shard import WHOLE, Shard
from megatron_bamboo.model.stage import Stage, build_scheduler, build_stage, follow_stages
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.observe.resources import Resources
from megatron_bamboo.observe.state_dump import dump_stage
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.planner.healing import stages_to_hold
from megatron_bamboo.planner.plan import Checkpoint, Plan, plan_digest
from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.script.args import dtype_of
from megatron_bamboo.script.data import open_data
from megatron_bamboo.script.providers import Script
from megatron_bamboo.script.state import get_args

T = TypeVar("T")
_HOLD_POLL_SECONDS = 0.05


def _sharing(layout: Layout, options: Options, plan: Plan) -> Layout:
    """With a share of the optimizer's state for each pipeline that works under a plan; where it is
    shared out these are always the same ones, until all begin again from a checkpoint."""
    if not options.optimizer.use_distributed_optimizer:
        return layout
    working = sum(pipeline.shape.num_microbatches > 0 for pipeline in plan.pipelines)
    return replace(layout, num_shards=working)


def make_worker(
    script: Script,
    options: Options,
    layout: Layout,
    environment: WorkerEnvironment,
    client: StoreClient,
    where: Whereabouts,
) -> "Worker":
    """A worker as its process begins; of a standby when it has got a place."""
    arguments = (script, options, layout, environment, client, where)
    try:
        return Worker(*arguments)
    except GoBack as back:
        plan = back.plan
    return Worker(*arguments, plan)


class Worker:
    """Everything that one worker is made of, wired together.

    Args:
        restored: the plan by which all begin again; None for a process that begins.

    Raises:
        GoBack: all begin again, and this standby with them.
    """

    def __init__(
        self,
        script: Script,
        options: Options,
        layout: Layout,
        environment: WorkerEnvironment,
        client: StoreClient,
        where: Whereabouts,
        restored: Plan | None = None,
    ) -> None:
        self._where = where
        self._script = script
        self._options = options
        self._layout = layout
        self._environment = environment
        self._client = client
        self._events = EventLog(environment.job_dir / "events", environment.worker)
        node, training = environment.worker, options.training
        self.last_step = training.train_iters
        """After which the training is done; all learn at once if it is to be sooner."""
        with where.at(environment.start_step, START, waits_for="a place"):
            self._assignment = Assignment(client, node, self._read_plan, restored)
        # Where the workers of this node meet, a key for each time that they do.
        self._home = environment.node
        self._start = Checkpoint(environment.start_step, options.checkpoint.load)
        if restored is not None and restored.restored is not None:
            self._home, self._start = f"{environment.node}/{restored.epoch}", restored.restored
            layout = self._layout = _sharing(layout, options, restored)
        self._dropout = DropoutSeeds(training.seed, environment.tensor_rank)
        self._groups = model_groups(self._tensor_group())
        prepare_process(self._groups)
        self._recipe = Recipe.of(options, script.model, self._groups, self._dropout)
        self._loss_scale = self._recipe.loss_scale
        with where.at(environment.start_step, START, waits_for="a place"):
            numbers = self._assignment.stages()
            shape, in_force = self._assignment.shape, self._assignment.in_force
        assert shape is not None, "a stage is built before it is known whose it is"
        if in_force is not None:
            layout = self._layout = _sharing(layout, options, in_force)
        self._held = HeldStages(
            self._build_stage, Holding(numbers, shape), draws=not self._assignment.is_standby
        )
        self._stages = self._held.stages
        self._scheduler = build_scheduler(
            self._stages, options.optimizer, training.train_iters, layout.global_batch_size
        )
        self._checkpoints = Checkpoints(
            options,
            plain_args(get_args()),
            environment,
            client,
            self._stages,
            self._scheduler,
            self._loss_scale,
            lambda num_samples: fingerprint(self._datasets.train, num_samples),
            self._events,
        )
        self._datasets = open_data(script.datasets, options, layout)
        with where.at(environment.start_step, START, waits_for="a place"):
            self._plan = self._assignment.plan()
        arrangement = self._plan.arrangement
        self._commit_layout = CommitLayout(
            unit_parts(arrangement.num_units, layout.tensor_size), arrangement.total_microbatches
        )
        self._view = PipelineView(
            node,
            self._plan,
            options.bamboo.bamboo_redundancy,
            costs_of(options.bamboo, arrangement)[self._plan.pipeline_of(node)],
            tied=not options.model.untie_embeddings_and_output_weights,
            sharded=layout.num_shards > 1,
            num_mirrors=options.bamboo.bamboo_mirror_gradients,
            max_deferred=options.bamboo.bamboo_max_deferred,
            verifies_in=lambda step: self._verification.is_due(step),
        )
        self.data = StepData(
            self._datasets.train,
            training.micro_batch_size,
            layout.global_batch_size,
            self._view,
            self._events,
        )
        self._ledger = CommitLedger(node)
        self._mailbox = Mailbox()
        self._registry = GroupRegistry(node, self._make_store, self._timeout())
        self._verification = self._make_verification()
        bandwidth = options.bamboo.bamboo_emulated_bandwidth
        self._link = None if bandwidth is None else Link(1e6 * bandwidth)
        self._transport = Transport(self._mailbox, self._make_pair)
        self._reporter = StepReporter(client)
        self._account: MemoryAccount | None = None
        self._injector = self._make_injector()
        parts = self._parts()
        self._executor = Executor(parts, self._view, self._plan)
        self._evaluator = self._make_evaluator(parts)
        self._watch = EpochWatch(
            client, node, layout.tensor_size, self._plan, self._ledger, self._handlers()
        )

    def begin(self) -> int:
        """Get ready; the number of steps that are done already."""
        if self._assignment.is_standby:
            assert self._plan.change is not None, f"epoch {self._plan.epoch} has no place for it"
            start_step = self._plan.change.step - 1
        else:
            with self._where.at(self._start.step, START):
                start_step = self._checkpoints.load(self._start)
        self._ledger.note_gathered(start_step)
        self._watch.start()
        if not self._assignment.is_standby:
            self._client.set(f"ready/{self._environment.worker}", b"1")
        self._executor.start(self._watch, start_step)
        # In its first step a standby gets the state that its report would tell.
        self._first_reported = start_step + 1 + self._assignment.is_standby
        return start_step

    def retire(self, plan: Plan) -> "Callable[[], Worker]":
        """Let go of all that this worker has, for another that begins again by a plan; makes it."""
        self._watch.close()
        self._reporter.abandon()
        pairs = self._registry.renew_pairs(plan.epoch, [self._environment.worker])
        self._transport.renew(pairs, forgets_step=True)
        self._registry.close()
        self._stages.clear()
        self._events.emit("went_back", epoch=plan.epoch, step=self._executor.step)
        self._events.close()
        # What has struck does not strike again in the same step.
        environment = replace(self._environment, inject=self._injector.left)
        made_of = (self._script, self._options, self._layout, environment)
        client, where = self._client, self._where
        return lambda: Worker(*made_of, client, where, plan)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._executor.plan

    @property
    def num_microbatches(self) -> int:
        """Of this worker's pipeline."""
        return self._view.shape.num_microbatches

    @property
    def chunks(self) -> list[nn.Module]:
        """All that are held here."""
        return [chunk for stage in self._stages.values() for chunk in stage.chunks]

    def run_step(self, step: int, one_step: Callable[[Callable[..., list[Any]]], T]) -> T:
        """One step, whatever is lost meanwhile, then an evaluation and a checkpoint if they are
        due; where the job is to end at once there is no evaluation.

        Args:
            one_step: calls the function that it is given once.

        Raises:
            LetGo: this node's part is done.
            RuntimeError: the function was not called.
        """
        with self._where.at(step, LOOP):
            result = self._train_step(step, one_step)
        ends_early = step == self.last_step < self._options.training.train_iters
        if not ends_early:
            self._evaluator.after_step(step)
        with self._where.at(step, SAVE):
            hold = self.plan.hold
            is_held = hold is not None and step == hold.step
            self._checkpoints.save_if_due(step, self._executor, step == self.last_step, is_held)
        self._await_nodes(step)
        if step == self._options.training.train_iters:
            self._evaluator.after_training()
        return result

    def _await_nodes(self, step: int) -> None:
        """Stay between two steps for as long as the plan says so."""
        while (hold := self.plan.hold) is not None and hold.stops(step):
            with self._where.at(step, HOLD):  # anew each time: however long it is, it is no hang
                time.sleep(_HOLD_POLL_SECONDS)
                self._executor.follow_plans()

    def megatrons_step(self, forward_backward_func: Callable[..., list[Any]]) -> list[Any]:
        """The call of it in Megatron-LM's own loop."""
        return forward_backward_func(
            forward_step_func=self._script.forward_step,
            data_iterator=self.data.microbatches(self._executor.step + 1),
            model=self.chunks,
            num_microbatches=self.num_microbatches,
            seq_length=self._options.data.seq_length,
            micro_batch_size=self._options.training.micro_batch_size,
        )

    def face_first_stage(self) -> None:
        """Let Megatron's state answer, between two steps, for the first stage that runs here."""
        pipeline, shape = self._view.pipeline, self._view.shape
        first = pipeline.stages.index(self._environment.worker)
        set_current_stage(first, 0, shape.num_stages, shape.num_chunks)

    def script_groups(self, step: int) -> ScriptGroups | None:
        """Groups for the script's own collectives, made by all who have passed a step in the epoch
        in force; None where they are not, or a loss ends it before."""
        plan = self._executor.plan
        if self._ledger.epoch_of(step) != plan.epoch:
            return None
        with self._where.at(step, LOOP, waits_for="the others"):
            tensor, worker = self._groups.tp, self._environment.worker
            return make_script_groups(self._registry, plan, worker, step, tensor)

    def attempt(self, collective: Callable[[], T]) -> T | None:
        """A collective of the script; None where a loss has broken it."""
        epoch, step = self._executor.plan.epoch, self._executor.step
        with self._where.at(step, LOOP, waits_for="the others"):
            try:
                return collective()
            except (RuntimeError, ValueError) as error:
                # To report a failure torch asks for what only groups of a world have, and fails.
                broken = error if isinstance(error, RuntimeError) else error.__context__
                if not isinstance(broken, RuntimeError):
                    raise
                what = f"a collective of the script in epoch {epoch}"
                lost = PeerLost(self._executor.plan.nodes, what, broken)
                self._executor.await_plan("a collective of the script", step, lost)
                return None

    def _train_step(self, step: int, one_step: Callable[[Callable[..., list[Any]]], T]) -> T:
        start = time.monotonic()
        result = one_step(self._executor.forward_backward_func)
        if self._executor.step != step:
            raise RuntimeError(f"step {step} ended without a call of its forward_backward_func")
        # The step's own; both change when it is applied.
        learning_rate, loss_scale = self._learning_rate(), self._loss_scale.value
        vector = self._executor.finish_step()
        if step >= self._first_reported:
            self._report(step, vector, learning_rate, loss_scale, time.monotonic() - start)
        held = asdict(Resources.now())
        self._events.emit("resources", step=step, pipeline=self._view.number, **held)
        if self._commit_layout.must_end(vector):
            self.last_step = step
        return result

    def _report(
        self,
        step: int,
        vector: tuple[float, ...],
        learning_rate: float,
        loss_scale: float,
        seconds: float,
    ) -> None:
        plan = self._executor.plan
        report = StepReport(
            step=step,
            epoch=plan.epoch,
            loss=self._commit_layout.loss(vector).hex(),
            lr=learning_rate,
            grad_norm=(self._commit_layout.gradient_norm(vector) / loss_scale).hex(),
            loss_scale=loss_scale,
            samples=step * self._layout.global_batch_size,
            seconds=seconds,
            vector=to_hex(vector),
            differences=tuple(map(str, self._verification.differences)),
        )
        is_new, self._plan = plan is not self._plan, plan
        is_first = plan.reporter == self._environment.worker
        self._reporter.passed(report, is_first=is_first and not is_new)
        if is_new:
            self._reporter.repeat()

    def leave(self) -> None:
        """End when nobody needs anything of this node any more.

        The others have its state and go on without it, but one of them may still wait in the last
        commit that it took part in.
        """
        self._events.emit("let_go", step=self._executor.step, epoch=self._executor.plan.epoch)
        with self._where.at(self._executor.step, LEAVE, waits_for="the others"):
            self._reporter.finish()
            self._assignment.await_release()
        self._events.emit("traffic", peers=self._transport.traffic())
        self._watch.close()

    def finish(self) -> None:
        """After the last step: write down what is held."""
        with self._where.at(self.last_step, FINISH):
            self._finish()

    def _finish(self) -> None:
        if self._view.sharded or self._options.bamboo.bamboo_verify_replicas:
            await_gathers(
                self._executor,
                self._client,
                self._environment.worker,
                self._layout.tensor_size,
                self._timeout().total_seconds(),
            )
        self._reporter.finish()
        if self._account is not None:
            self._account.say(self._events)
        plan, place = self._executor.plan, self._view.number
        pipeline = plan.pipelines[place]
        for number in stages_to_hold(pipeline, self._environment.worker):
            if (place, number, self._environment.worker) in plan.lacking:
                continue  # it was to come in a step that never does
            stage = self._stages[number]
            make_moments(stage)  # who moved has them, also if every step was skipped
            is_primary = pipeline.stages[number] == self._environment.worker
            dump_stage(
                self._environment.job_dir,
                self._environment.worker,
                self._view.number,
                number,
                "primary" if is_primary else "replica",
                self.last_step,
                self._loss_scale.value,
                self._named_state(stage),
            )
        self._events.emit("traffic", peers=self._transport.traffic())
        self._watch.close()

    def _named_state(self, stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
        """A stage's tensors; where workers share layers, each one's part by a name of its own."""
        rank, size = self._environment.tensor_rank, self._environment.tensor_size
        for name, tensor in stage.state():
            yield (name if size == 1 else f"tensor{rank}/{name}"), tensor
        if self._loss_scale.is_used:
            yield f"loss_scale/worker{rank}/state", self._loss_scale.state()

    def _learning_rate(self) -> float:
        return float(self._scheduler.get_lr(self._scheduler.optimizer.param_groups[0]))

    def _build_stage(self, number: int, shape: PipelineShape, draws: bool) -> Stage:
        num_shards = self._layout.num_shards
        shard = Shard(self._assignment.pipeline, num_shards) if num_shards > 1 else WHOLE
        return build_stage(number, shape, self._options.optimizer, self._recipe, shard, draws)

    def _hold(self, now: Holding, coming: Holding | None) -> Shapes:
        """Hold exactly these stages, and those of a new cut if there is to be one."""
        self._held.hold(now, coming)
        follow_stages(self._scheduler, self._stages)
        return self._shapes()

    def _promote(self) -> None:
        """Train with the stages of the new cut from now on, at the learning rate of the step."""
        self._held.promote()
        follow_stages(self._scheduler, self._stages)

    def _parts(self) -> Parts:
        worker, view = self._environment.worker, self._view
        tail = Tail(
            worker,
            self._stages,
            self._commit_layout,
            self._registry,
            self._transport,
            self._ledger,
            self._scheduler,
            self._loss_scale,
            self._layout.global_batch_size,
            self._environment.tensor_rank,
            self._verification,
            self._where.must_end,
        )
        compute = Compute(
            self._stages,
            self._dropout,
            self._mailbox,
            self._options.bamboo.bamboo_replica_memory,
            self._options.bamboo.bamboo_account_memory,
        )
        if self._options.bamboo.bamboo_account_memory:
            on_host = self._options.bamboo.bamboo_replica_memory is ReplicaMemory.HOST
            self._account = MemoryAccount(worker, self._stages, compute, self._transport, on_host)
        return Parts(
            worker=worker,
            tensor_size=self._layout.tensor_size,
            compute=compute,
            tail=tail,
            mirrors=Mirrors(self._stages, lambda: view.shape),
            verification=self._verification,
            account=self._account,
            transport=self._transport,
            registry=self._registry,
            ledger=self._ledger,
            events=self._events,
            handover=UnitHandover(
                self._held,
                self._transport,
                self._scheduler,
                self._loss_scale,
                self._plan.arrangement.num_units,
                self._layout.global_batch_size,
            ),
            hold=self._hold,
            promote=self._promote,
            before_action=self._injector.before_action,
            turnstile=self._turnstile(),
            wait_seconds=self._timeout().total_seconds(),
            where=self._where,
        )

    def _make_injector(self) -> Injector:
        def within(action: Action, step: int) -> AbstractContextManager[None]:
            return self._where.at(step, str(action), kind=(action.op, action.stage, action.chunk))

        inject = self._environment.inject
        return Injector(
            inject,
            self._events,
            within,
            self._stages,
            moving_step=lambda: self._view.moving_step,
            replicas=lambda: self._view.in_force.replicas_of(self._view.rank),
        )

    def _make_evaluator(self, parts: Parts) -> Evaluator:
        training, layout = self._options.training, self._layout
        sizes = (training.micro_batch_size, layout.global_batch_size)
        own = EvaluatorParts(
            parts,
            self._view,
            self._environment.tensor_rank,
            Mailbox(),
            EvaluationStore(self._client),
            Forwards(self._stages, self._script.forward_step),
            EvaluationData(self._datasets, *sizes, self._events),
            activation=lambda: self._shapes().activation,
            shaped=self._shaped,
            before=self._injector.before_evaluated,
        )
        return Evaluator(own, self._options.evaluations, self._executor)

    def _make_verification(self) -> Verification:
        layout, arrangement = self._layout, self._plan.arrangement
        num_pipelines = len(arrangement.pipelines)
        return Verification(
            self._environment.worker,
            self._environment.tensor_rank,
            self._stages,
            DigestLayout.of(arrangement.num_units, layout.tensor_size, num_pipelines),
            self._registry,
            self._events,
            self._options.bamboo.bamboo_verify_replicas,
            shared=layout.num_shards > 1,
        )

    def _turnstile(self) -> Turnstile | None:
        """Where the workers of this node meet, if there are several."""
        environment = self._environment
        if environment.tensor_size == 1:
            return None
        rank, seconds = environment.tensor_rank, self._timeout().total_seconds()
        if self._options.model.transformer_impl == EMULATED:
            DEVICE.share(
                share_memory(self._client, f"device/{self._home}", rank, 0, seconds), seconds
            )
        return Turnstile.meet(self._client, self._home, rank, environment.tensor_size, seconds)

    def _tensor_group(self) -> ProcessGroup | None:
        environment = self._environment
        if environment.tensor_size == 1:
            return None
        self._tensor_store = self._make_store(f"tensor/{self._home}/")
        return make_tensor_group(
            self._tensor_store, environment.tensor_rank, environment.tensor_size, self._timeout()
        )

    def _read_plan(self, published: bytes) -> Plan:
        """A plan as the workers of this tensor rank see it."""
        environment, plan = self._environment, Plan.from_json(published)
        self._events.emit("plan", epoch=plan.epoch, digest=plan_digest(published))
        return plan.for_tensor_rank(environment.tensor_rank, environment.tensor_size)

    def _shapes(self) -> Shapes:
        options = self._options
        shared_by = self._layout.tensor_size if options.parallel.sequence_parallel else 1
        activation = (
            options.data.seq_length // shared_by,
            options.training.micro_batch_size,
            options.model.hidden_size,
        )
        return shapes_of(self._stages, activation, dtype_of(options.precision))

    def _handlers(self) -> Handlers:
        def leave_groups(epoch: int, lost: Collection[str]) -> None:
            self._registry.leave(epoch, lost)
            self._transport.drop(lost)

        return Handlers(
            leave_groups=leave_groups,
            progress=self._executor.progress,
            read_plan=self._read_plan,
            wake=self._wake,
            prepare=self._executor.prepare,
            failed=self._say_raised,
        )

    def _wake(self) -> None:
        self._mailbox.wake()
        self._evaluator.wake()

    def _say_raised(self, error: Exception) -> None:
        raised = Raised.of(error, self._where.place)
        tell_raised(self._environment.store, self._environment.credential, raised)

    def _make_store(self, prefix: str) -> BambooStore:
        return BambooStore(self._client, prefix, self._timeout().total_seconds())

    def _make_pair(self, peer: str) -> Group | None:
        group = self._registry.get(pair_group(self._environment.worker, peer))
        return group if group is None else self._shaped(group)

    def _shaped(self, group: Group) -> Group:
        return group if self._link is None else ShapedGroup(group, self._link)

    def _timeout(self) -> timedelta:
        return timedelta(minutes=self._options.parallel.distributed_timeout_minutes)
