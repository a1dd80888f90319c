"""The training script's side: what it does in each of its phases.

``bamboo run`` starts a script twice over. Once alone, to check everything and prepare the data
before any worker exists; then on every node, to train (``worker.py``).
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_bamboo.agent.environment import WorkerEnvironment
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.config import Layout, Options, check_options, parse_options
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.quiet import quiet_megatron_import

with quiet_megatron_import():
    import torch

    from megatron_bamboo.data.gpt_dataset import prepare_train_dataset
    from megatron_bamboo.execution.compute import ForwardStepFunc
    from megatron_bamboo.execution.errors import TrainingError
    from megatron_bamboo.model import cpu
    from megatron_bamboo.model.profile import profile, table
    from megatron_bamboo.worker import Worker, data_options_of, tokenizer_of, vocab_size_of

USER_ERROR_STATUS = 2
TRAINING_ERROR_STATUS = 1

logger = logging.getLogger(__name__)


def pretrain(forward_step: ForwardStepFunc, argv: Sequence[str] | None = None) -> int:
    """Do this process's part of the run that ``bamboo run`` started; the exit status.

    Args:
        forward_step: Megatron's: takes the data iterator and a model chunk, returns the output and
            the loss function.
        argv: Megatron's flags; those of the command line if None.
    """
    phase = os.environ.get("BAMBOO_PHASE")
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        if phase is None:
            raise UserError("start this script with: bamboo run --nodes N SCRIPT FLAGS")
        if phase == "profile":
            _profile(forward_step, options)
            return 0
        layout = check_options(
            options,
            num_nodes=int(os.environ["BAMBOO_NUM_NODES"]),
            workers_per_node=int(os.environ["BAMBOO_WORKERS_PER_NODE"]),
        )
        if phase == "prepare":
            _prepare(options, layout, Path(os.environ["BAMBOO_JOB_DIR"]))
            return 0
    except UserError as error:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {error}\n")
        return USER_ERROR_STATUS
    return _train(forward_step, options, layout)


def _profile(forward_step: ForwardStepFunc, options: Options) -> None:
    """Time the model, chunk by chunk, for one who chooses where redundant forwards go."""
    layout = check_options(options, num_nodes=options.parallel.pipeline_model_parallel_size)
    _prepare_torch()
    repeats = int(os.environ["BAMBOO_PROFILE_REPEATS"])
    costs = profile(options, layout, vocab_size_of(options), forward_step, repeats)
    output = Path(os.environ["BAMBOO_PROFILE_OUTPUT"])
    try:
        output.write_text(costs.to_json() + "\n")
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from error
    sys.stdout.write("\n".join(table(costs)) + "\n")


def _prepare(options: Options, layout: Layout, job_dir: Path) -> None:
    """Check the data, build its indices, and tell the launcher the job's shape."""
    samples = prepare_train_dataset(data_options_of(options, layout), tokenizer_of(options))
    logger.info("%d training samples", samples)
    JobShape(
        num_stages=layout.num_stages,
        num_pipelines=layout.num_pipelines,
        num_microbatches=layout.num_microbatches,
        redundancy=options.bamboo.bamboo_redundancy,
        train_iters=options.training.train_iters,
        global_batch_size=layout.global_batch_size,
        num_chunks=layout.num_chunks,
        tensor_size=layout.tensor_size,
    ).write(job_dir)


def _train(forward_step: ForwardStepFunc, options: Options, layout: Layout) -> int:
    """Train on this node until the last step."""
    _prepare_torch()
    environment = WorkerEnvironment.read()
    client = StoreClient(environment.store, environment.store_deadline_seconds)
    worker = Worker(options, layout, environment, client)
    try:
        worker.train(forward_step)
    except TrainingError as error:
        # The same on every worker: the job ends, no node is at fault.
        client.compare_set("failed", None, str(error).encode())
        return TRAINING_ERROR_STATUS
    client.set(f"done/{environment.worker}", b"1")
    return 0


def _prepare_torch() -> None:
    # One thread a worker: with two, equal products gave different bits from run to run.
    torch.set_num_threads(1)
    cpu.install()
