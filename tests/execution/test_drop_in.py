"""``megatron_bamboo.patch()``: Megatron-core's own training loop over the product's schedule."""

import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from comparison import differing
from megatron.core import pipeline_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from processes import run_processes
from shape_runs import ShapeRuns
from shapes import Shape
from trained_stages import Job

import megatron_bamboo
from megatron_bamboo.execution.megatron_schedule import MegatronSchedule

ACCEPTED = (
    Shape(2, 1, 1, 3),
    Shape(4, 1, 1, 2),  # fewer than stages, which Megatron takes if there is one chunk
    Shape(2, 2, 1, 4),
    Shape(3, 2, 1, 3),
    Shape(2, 2, 2, 2),
)
REFUSED = (Shape(2, 2, 1, 1), Shape(3, 2, 1, 4))


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
@pytest.mark.parametrize("shape", ACCEPTED, ids=str)
def test_what_megatron_accepts_has_megatrons_bits(shape_runs: ShapeRuns, shape: Shape) -> None:
    groups = {shape: [shape.num_stages]}
    (megatrons,) = shape_runs.by_megatron(groups).values()
    (ours,) = shape_runs.by_megatron(groups, is_patched=True).values()
    assert differing(megatrons, ours, "") == []


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
@pytest.mark.parametrize("shape", REFUSED, ids=str)
def test_what_megatron_refuses_has_the_products_bits(shape_runs: ShapeRuns, shape: Shape) -> None:
    (ours,) = shape_runs.by_megatron({shape: [shape.num_stages]}, is_patched=True).values()
    assert differing(shape_runs.by_product(shape), ours, "") == []


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "function", ["evaluate", "lose_a_neighbour", "patch_again", "refuse", "train_half_freed"]
)
def test_in_ranks_of_megatron(
    function: str, context: ForkServerContext, tmp_path: Path, data_flags: tuple[str, ...]
) -> None:
    job = Job(2, 1, 3, str(tmp_path), data_flags, num_chunks=2)
    run_processes(context, job, "megatron_side", "prepare_data", [([job],)])
    ranks = [(job, rank) for rank in range(job.num_workers)]
    run_processes(context, job, "patched_ranks", function, ranks)


def test_the_patch_reaches_those_who_have_it_by_name_and_undoes_itself() -> None:
    this, before = sys.modules[__name__], get_forward_backward_func
    with megatron_bamboo.patch():
        for module in (this, pipeline_parallel, schedules):
            assert isinstance(module.get_forward_backward_func(2, None), MegatronSchedule)
        assert get_forward_backward_func(1, None) is schedules.forward_backward_no_pipelining
        with pytest.raises(RuntimeError, match="patched already"):
            megatron_bamboo.patch()
    for module in (this, pipeline_parallel, schedules):
        assert module.get_forward_backward_func is before
    patched = megatron_bamboo.patch()
    patched.undo()
    patched.undo()
    assert get_forward_backward_func is before
