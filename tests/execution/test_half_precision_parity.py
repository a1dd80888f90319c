"""In half precision too the product gives Megatron-core's own bits, skipped steps included.

With float16 in one pipeline: of two, Megatron halves the gradients when it has summed them, the
product the loss, so that other scales of the loss overflow. In bfloat16 halving is exact.
"""

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from comparison import differing, of_kind
from processes import run_processes
from trained_stages import Job, Run, Stages, load_stages

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

NUM_STEPS = 8
FLOAT16 = ("--fp16", "--hysteresis", "1", "--loss-scale-window", "2")
CASES = {
    "bfloat16": (Job(2, 2, 2, "", (), ("--bf16",)), 0),
    "bfloat16 interleaved": (Job(2, 1, 4, "", (), ("--bf16",), num_chunks=2), 0),
    "bfloat16 scaled": (Job(2, 1, 2, "", (), ("--bf16", "--loss-scale", "1024")), 0),
    # It overflows at first, and when it was doubled again.
    "float16": (Job(2, 1, 2, "", (), (*FLOAT16, "--initial-loss-scale", "4194304")), 2),
    "float16 in four stages": (
        Job(4, 1, 4, "", (), (*FLOAT16, "--initial-loss-scale", "2097152")),
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_equal(
    name: str, tmp_path: Path, data_flags: tuple[str, ...], context: ForkServerContext
) -> None:
    case, least_skipped = CASES[name]
    megatron, product = _train_both(case, tmp_path, data_flags, context)
    assert differing(megatron, product, "loss/") == []
    assert differing(megatron, product, "gradient/") == []
    assert [n for n in differing(megatron, product, "state/") if "loss_scale" not in n] == []
    kinds = {tensor.rpartition("/")[2] for tensor, _ in of_kind(megatron, "state/")}
    assert kinds == {"parameter", "main", "exp_avg", "exp_avg_sq", "step"}
    applied = {tensor.split("/")[1] for tensor, _ in of_kind(product, "gradient/")}
    assert least_skipped <= NUM_STEPS - len(applied) < NUM_STEPS - 1
    assert least_skipped > 0 or len(applied) == NUM_STEPS


def _train_both(
    case: Job, folder: Path, data_flags: tuple[str, ...], context: ForkServerContext
) -> tuple[Stages, Stages]:
    num_layers = case.num_stages * case.num_chunks
    job = Job(
        case.num_stages,
        case.num_pipelines,
        case.num_microbatches,
        str(folder),
        data_flags,
        case.more_flags,
        num_chunks=case.num_chunks,
        num_layers=num_layers,
        num_steps=NUM_STEPS,
    )
    run_processes(context, job, "product_side", "train_job", [(job, folder / "product")])
    run = Run(job, folder / "megatron")
    ranks = [([run], rank) for rank in range(job.num_workers)]
    run_processes(context, job, "megatron_side", "train_rank", ranks)
    return load_stages(folder / "megatron"), load_stages(folder / "product")
