"""Shapes that Megatron-core refuses to interleave: the product trains as one process does.

The reference is the uncut model, which Megatron's ``forward_backward_no_pipelining`` trains on the
same batches, one microbatch after the other.

**The tolerance.** Each microbatch's own numbers are the same to the bit, so the losses of the first
step are. What may differ is the order in which a gradient's summands are added: two pipelines add
up their own microbatches first, and a tied weight's two roles are summed apart. In float32 two
orders of n summands differ by at most about n * 2**-24 of what the summands' magnitudes add up to,
1e-6 for the 17 of the largest batch here. The steps after that start from weights that differ by so
much, which the model may magnify: hence ten times as much, 1e-5 of the tensor's largest element.
The largest difference of the whole grid is 1e-6; one of 14 microbatches that is left out, or
counted twice, moves each gradient by more than 4,000 times the tolerance, later losses by 100.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from comparison import of_kind, relative_difference
from shape_runs import NUM_STEPS, ShapeRuns
from shapes import Shape, families, refused_by_default, short_families
from torch import Tensor
from trained_stages import Stages, StageTensors

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
KINDS = ("loss/", "gradient/", "state/")


@dataclass(frozen=True, slots=True)
class Pair:
    """One shape, trained by the product, and its uncut model in one process."""

    product: Stages
    uncut: StageTensors

    def differences(self, kind: str) -> Iterator[tuple[float, str]]:
        """How far the product's tensors of one kind are off, on each stage of each pipeline."""
        for name, tensor in of_kind(self.product, kind):
            yield relative_difference(tensor, self._uncut(name)), name

    def _uncut(self, name: str) -> Tensor:
        """The uncut model has a tied weight once."""
        tied = name.replace("head/output_layer", "embedding/embedding.word_embeddings")
        return self.uncut[name if name in self.uncut else tied]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(f, id=f.family, marks=[] if f in short_families() else [pytest.mark.slow])
        for f in families()
    ],
)
def pairs(request: pytest.FixtureRequest, shape_runs: ShapeRuns) -> dict[Shape, Pair]:
    shapes = refused_by_default(request.param)
    uncut = shape_runs.in_one_process(shapes)
    return {shape: Pair(shape_runs.by_product(shape), uncut[shape]) for shape in shapes}


def test_first_losses_are_equal(pairs: dict[Shape, Pair]) -> None:
    for shape, pair in pairs.items():
        differences = [difference for difference, _name in pair.differences("loss/1/")]
        assert differences == [0.0] * shape.num_pipelines * shape.num_microbatches


@pytest.mark.parametrize("kind", KINDS)
def test_all_agrees_within_rounding(pairs: dict[Shape, Pair], kind: str) -> None:
    for shape, pair in pairs.items():
        worst, name = max(pair.differences(kind))
        assert worst <= TOLERANCE, f"{shape} {name}"


def test_nothing_is_missing(pairs: dict[Shape, Pair]) -> None:
    for shape, pair in pairs.items():
        names = {name for kind in KINDS for name, _ in of_kind(pair.product, kind)}
        tied = {name for name in names if "/head/output_layer." in name}
        assert len(tied) == NUM_STEPS + 4  # gradients; parameter, two moments and step count
        assert names - tied == pair.uncut.keys(), shape


@pytest.mark.parametrize("weight", [0.0, 2.0], ids=["left out", "counted twice"])
@pytest.mark.parametrize("microbatch", [0, 13])
def test_one_wrong_microbatch_of_fourteen_is_far_outside(
    shape_runs: ShapeRuns, microbatch: int, weight: float
) -> None:
    shape = Shape(2, 2, 2, 7)
    weights = tuple(weight if number == microbatch else 1.0 for number in range(14))
    uncut = shape_runs.in_one_process([shape], weights)[shape]
    wrong = Pair(shape_runs.by_product(shape), uncut)
    assert min(wrong.differences("gradient/1/"))[0] > 1000 * TOLERANCE
    assert max(wrong.differences("state/"))[0] > 1000 * TOLERANCE
    assert max(wrong.differences("loss/3/"))[0] > 50 * TOLERANCE
