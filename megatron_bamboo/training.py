"""``pretrain`` for a script that was written for Megatron-LM, and what such a script imports;
``train`` for one with a training loop of its own.

``bamboo run`` starts the script twice over. Once alone, to check everything and prepare the data
before any worker exists; then on every node, to train (``worker.py``). A node that joins from
elsewhere and does not see the prepared data has the script prepare them there first.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from megatron_bamboo.agent.environment import WorkerEnvironment
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.process import hear_sigterm
from megatron_bamboo.config import (
    ExtraArgsProvider,
    Layout,
    Options,
    check_options,
    parse_flags,
    read_costs,
    read_unit_bytes,
    read_works,
    without_nodes,
)
from megatron_bamboo.config.emulation import known_bandwidth
from megatron_bamboo.config.options import OnTooFew
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.place import LOOP
from megatron_bamboo.membership.raised import Raised, tell_raised
from megatron_bamboo.membership.signs import SignPage
from megatron_bamboo.membership.store_client import NodeFenced, StoreClient
from megatron_bamboo.quiet import quiet_megatron_import

with quiet_megatron_import():
    import torch
    from megatron.core.enums import ModelType

    from megatron_bamboo.checkpoint.common import plain_args
    from megatron_bamboo.checkpoint.start import prepare_checkpoints
    from megatron_bamboo.data.fingerprint import fingerprint
    from megatron_bamboo.data.tokenizer import GPT2BPETokenizer
    from megatron_bamboo.execution.epochs import FENCED_STATUS
    from megatron_bamboo.execution.errors import TrainingError
    from megatron_bamboo.execution.whereabouts import Limits, Whereabouts
    from megatron_bamboo.hook import Loop, RecoveryHook, megatrons_loop
    from megatron_bamboo.model import cpu
    from megatron_bamboo.model.config import core_transformer_config_from_args
    from megatron_bamboo.model.layer_spec import gpt_layer_spec
    from megatron_bamboo.model.profile import profile, table
    from megatron_bamboo.script.args import make_args
    from megatron_bamboo.script.batches import (
        get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank,
        get_blend_and_blend_per_split,
        is_first_or_last_pipeline_stage,
    )
    from megatron_bamboo.script.data import index_folder, prepare_data
    from megatron_bamboo.script.inputs import inputs_of
    from megatron_bamboo.script.providers import (
        DatasetsProvider,
        ForwardStepFunc,
        ModelProvider,
        Script,
    )
    from megatron_bamboo.script.state import (
        begin,
        get_args,
        get_timers,
        get_tokenizer,
        print_rank_0,
    )
    from megatron_bamboo.worker import make_worker

__all__ = (
    "RecoveryHook",
    "Script",
    "core_transformer_config_from_args",
    "get_args",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_blend_and_blend_per_split",
    "get_timers",
    "get_tokenizer",
    "gpt_layer_spec",
    "is_first_or_last_pipeline_stage",
    "pretrain",
    "print_rank_0",
    "run_phase",
    "train",
)

USER_ERROR_STATUS = 2
TRAINING_ERROR_STATUS = 1
# Beyond the deadlines of its waits, before a main thread counts as stuck wherever it is.
GRACE_SECONDS = 60.0


def pretrain(
    train_valid_test_datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    model_type: ModelType,
    forward_step_func: ForwardStepFunc,
    process_non_loss_data_func: None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] = MappingProxyType({}),
    get_embedding_ranks: None = None,
    get_position_embedding_ranks: None = None,
    non_loss_data_func: None = None,
) -> None:
    """Do this process's part of the run that ``bamboo run`` started.

    The arguments are those of Megatron-LM's ``pretrain``, by name and order. Those that are None
    here have nothing to say in this schedule: an evaluation gives losses alone, and no worker has
    a fixed place.

    Raises:
        SystemExit: with the status of a phase that did not end well.
    """
    refused = (
        process_non_loss_data_func,
        get_embedding_ranks,
        get_position_embedding_ranks,
        non_loss_data_func,
    )
    if model_type is not ModelType.encoder_or_decoder or any(f is not None for f in refused):
        raise ValueError(
            "pretrain takes ModelType.encoder_or_decoder, and none of process_non_loss_data_func, "
            "get_embedding_ranks, get_position_embedding_ranks, non_loss_data_func"
        )
    script = Script(train_valid_test_datasets_provider, model_provider, forward_step_func)
    status = run_phase(script, sys.argv[1:], extra_args_provider, args_defaults)
    if status:
        raise SystemExit(status)


def train(
    loop: Loop,
    train_valid_test_datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step_func: ForwardStepFunc,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Do this process's part of a run with a training loop of one's own (see ``hook.py``).

    Args:
        loop: goes through ``hook.steps()``, and calls ``hook.step`` once for each.
        forward_step_func: what memory and times are worked out with; the loop's own is what runs.

    Raises:
        SystemExit: with the status of a phase that did not end well.
    """
    script = Script(train_valid_test_datasets_provider, model_provider, forward_step_func)
    status = run_phase(script, sys.argv[1:], extra_args_provider, args_defaults, loop)
    if status:
        raise SystemExit(status)


def run_phase(
    script: Script,
    argv: Sequence[str],
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] = MappingProxyType({}),
    loop: Loop = megatrons_loop,
) -> int:
    """Do what the environment says of a run with these flags; the exit status."""
    phase = os.environ.get("BAMBOO_PHASE")
    try:
        options, extras = parse_flags(argv, extra_args_provider, args_defaults)
        if phase is None:
            raise UserError("start this script with: bamboo run --nodes N SCRIPT FLAGS")
        layout = _layout(phase, options)
        tokenizer = GPT2BPETokenizer(options.data.vocab_file, options.data.merge_file)
        args = make_args(options, layout, tokenizer.vocab_size, extras)
        begin(args, tokenizer, speaks=_speaks(phase))
        if phase == "profile":
            _profile(script, options, layout)
            return 0
        if phase == "memory":
            _say_memory(script, options, layout)
            return 0
        if phase == "index":
            prepare_data(script.datasets, options, layout)
            return 0
        if phase == "prepare":
            _prepare(script, options, layout, Path(os.environ["BAMBOO_JOB_DIR"]))
            return 0
    except UserError as error:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {error}\n")
        return USER_ERROR_STATUS
    return _train(script, options, layout, loop)


def _layout(phase: str, options: Options) -> Layout:
    if phase == "profile":
        alone, num_nodes = without_nodes(options)
        return check_options(alone, num_nodes, options.parallel.tensor_model_parallel_size)
    return check_options(
        options,
        num_nodes=int(os.environ["BAMBOO_NUM_NODES"]),
        workers_per_node=int(os.environ["BAMBOO_WORKERS_PER_NODE"]),
    )


def _speaks(phase: str) -> bool:
    return phase != "train" or WorkerEnvironment.read().speaks


def _profile(script: Script, options: Options, layout: Layout) -> None:
    """Time the model by chunk, for where redundant forwards go, and by unit, for the planner."""
    # Made with parts of torch that may change, which no training needs.
    from megatron_bamboo.model.unit_costs import measure_units, units_table

    _prepare_torch()
    repeats = int(os.environ["BAMBOO_PROFILE_REPEATS"])
    vocab = get_args().padded_vocab_size
    arguments = (options, layout, vocab, script.model, script.forward_step)
    costs, units = profile(*arguments, repeats), measure_units(*arguments, repeats)
    output = Path(os.environ["BAMBOO_PROFILE_OUTPUT"])
    try:
        output.write_text(json.dumps(json.loads(costs.to_json()) | units.to_json()) + "\n")
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from error
    sys.stdout.write("\n".join([*table(costs), "", *units_table(units)]) + "\n")


def _say_memory(script: Script, options: Options, layout: Layout) -> None:
    """Say what each worker will need, from shapes alone."""
    # Made with parts of torch that may change: no training needs them without a given bandwidth.
    from megatron_bamboo.model import footprints

    _prepare_torch()
    vocab = get_args().padded_vocab_size
    nodes = footprints.predict(options, layout, vocab, script.model, script.forward_step)
    is_json = os.environ["BAMBOO_MEMORY_FORM"] == "json"
    lines = [footprints.to_json(nodes)] if is_json else footprints.table(nodes, options)
    sys.stdout.write("\n".join(lines) + "\n")


def _check_links(script: Script, options: Options, layout: Layout) -> None:
    """Refuse mirrors that the links cannot carry, if it is known what these can."""
    bandwidth = known_bandwidth(options.model, options.bamboo)
    if bandwidth is None or not options.bamboo.bamboo_mirror_gradients:
        return
    from megatron_bamboo.model import footprints

    _prepare_torch()
    vocab = get_args().padded_vocab_size
    provided = (script.model, script.forward_step)
    footprints.check_links(options, layout, vocab, *provided, bandwidth)


def _prepare(script: Script, options: Options, layout: Layout, job_dir: Path) -> None:
    """Check the data, build its indices, and tell the launcher the job's shape."""
    _check_links(script, options, layout)
    dataset = prepare_data(script.datasets, options, layout).train
    start = prepare_checkpoints(
        options.checkpoint, plain_args(get_args()), partial(fingerprint, dataset)
    )
    for note in start.notes:
        sys.stdout.write(f"{Path(sys.argv[0]).name}: {note}\n")
    JobShape(
        arrangement=layout.arrangement,
        redundancy=options.bamboo.bamboo_redundancy,
        train_iters=options.training.train_iters,
        global_batch_size=layout.global_batch_size,
        tensor_size=layout.tensor_size,
        start_step=start.step,
        loaded_from=options.checkpoint.load if start.step else None,
        lease_seconds=options.bamboo.bamboo_lease,
        group_timeout_seconds=60 * options.parallel.distributed_timeout_minutes,
        num_mirrors=options.bamboo.bamboo_mirror_gradients,
        costs=tuple(c.to_json() for c in read_costs(options.bamboo, layout.arrangement)),
        policy=options.bamboo.bamboo_policy,
        num_shards=layout.num_shards,
        unit_works=tuple(read_works(options.bamboo, layout.arrangement.num_units)),
        inputs=inputs_of(options),
        indices=str(index_folder(options, layout)),
        restores=options.restores,
        saves=options.checkpoint.save is not None,
        waits=options.bamboo.bamboo_on_too_few is OnTooFew.WAIT,
        interface=options.bamboo.bamboo_interface,
        unit_bytes=read_unit_bytes(options, get_args().padded_vocab_size),
        least_nodes=options.bamboo.bamboo_least_nodes,
        verifies=options.bamboo.bamboo_verify_replicas > 0,
        eval_interval=None if options.evaluations.is_empty else options.evaluations.interval,
    ).write(job_dir)


def _train(script: Script, options: Options, layout: Layout, loop: Loop) -> int:
    """Train on this node until the last step."""
    # Whoever says so to one process of a node means its machine.
    hear_sigterm(lambda: os.kill(os.getppid(), signal.SIGTERM))
    _prepare_torch()
    environment = WorkerEnvironment.read()
    client = StoreClient(
        environment.store, environment.store_deadline_seconds, environment.credential, _leave
    )
    where = _whereabouts(options, environment)
    try:
        worker = make_worker(script, options, layout, environment, client, where)
        hook = RecoveryHook(worker, makes_groups=loop is not megatrons_loop)
        with where.at(environment.start_step, LOOP):
            loop(hook)
        hook.finish()
    except (TrainingError, UserError) as error:
        # The same on every worker: the job ends, no node is at fault.
        client.compare_set("failed", None, str(error).encode())
        return TRAINING_ERROR_STATUS
    except SystemExit as ended:
        sys.stderr.write(f"{environment.worker}: the script ended this worker in {where.place}\n")
        _end_now(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except Exception as error:
        traceback.print_exc()
        tell_raised(environment.store, environment.credential, Raised.of(error, where.place))
        _end_now(TRAINING_ERROR_STATUS)
    client.set(f"done/{environment.worker}", b"1")
    where.done()
    return 0


def _whereabouts(options: Options, environment: WorkerEnvironment) -> Whereabouts:
    """Where this worker says what it is at, also to its agent, if it has one."""
    timeout = 60 * options.parallel.distributed_timeout_minutes
    # Outside of actions two waits in a row may come to their own deadlines.
    limits = Limits(options.bamboo.bamboo_lease, timeout / 2, 2 * timeout + GRACE_SECONDS)
    page = SignPage.open(environment.signs) if environment.signs else None
    if page is not None:
        page.start_beats()
    return Whereabouts(environment.start_step, limits, page)


def _leave(fenced: NodeFenced) -> NoReturn:
    """End a worker whose node was declared lost, whatever its threads are at."""
    sys.stderr.write(f"{fenced}\n")
    _end_now(FENCED_STATUS)


def _end_now(status: int) -> NoReturn:
    """End without taking anything apart: groups with a blocked operation would not let go of it
    before its timeout, and nobody would learn that this worker is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _prepare_torch() -> None:
    # One thread a worker: with two, equal products gave different bits from run to run.
    torch.set_num_threads(1)
    cpu.install()
