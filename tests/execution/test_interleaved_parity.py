"""Every small shape that Megatron-core interleaves: the product gives its bits.

The shapes are those of ``shapes.py``: for each number of microbatches all sizes of groups with
which Megatron accepts it. It computes in another order with each, the product in one of its own,
and gradients are summed in the order of the microbatches by all.

The product divides a loss by all microbatches of a step; Megatron by those of a pipeline, and later
the sums by the number of pipelines. With one or two pipelines that is the same to the bit for any
number of microbatches: halving is exact, so it may come first or last.

CI has some of the shapes, with one size of groups for each number of microbatches;
``pytest -m slow`` runs the whole grid.
"""

from dataclasses import dataclass

import pytest
from comparison import differing, of_kind
from shape_runs import NUM_STEPS, ShapeRuns
from shapes import MOST_MICROBATCHES, Shape, accepted, families, refusal, short_families
from trained_stages import Stages

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

MESSAGES = {
    ValueError: "ValueError: The number of contiguous micro-batches in a virtual pipeline stage",
    RuntimeError: "RuntimeError: The remainder of M (the total micro-batches) divided by N",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One shape, trained by Megatron with groups of one size, and by the product."""

    shape: Shape
    group_size: int
    megatron: Stages
    product: Stages

    def __str__(self) -> str:
        return f"{self.shape} in groups of {self.group_size}"


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((family, 1), id=f"{family.family}-one-size") for family in short_families()),
        *(
            pytest.param((family, None), id=family.family, marks=pytest.mark.slow)
            for family in families()
        ),
    ],
)
def pairs(request: pytest.FixtureRequest, shape_runs: ShapeRuns) -> tuple[Pair, ...]:
    family, most_sizes = request.param
    groups = {shape: shape.group_sizes[:most_sizes] for shape in accepted(family)}
    # The product takes no size of groups.
    products = {shape: shape_runs.by_product(shape) for shape in groups}
    return tuple(
        Pair(shape, size, megatron, products[shape])
        for (shape, size), megatron in shape_runs.by_megatron(groups).items()
    )


def test_losses_gradients_and_state_are_equal(pairs: tuple[Pair, ...]) -> None:
    different = {str(pair): differing(pair.megatron, pair.product, "") for pair in pairs}
    assert {name: tensors for name, tensors in different.items() if tensors} == {}


def test_every_loss_gradient_moment_and_parameter_was_there(pairs: tuple[Pair, ...]) -> None:
    for pair in pairs:
        shape = pair.shape
        losses = [name for name, _ in of_kind(pair.product, "loss/")]
        assert len(losses) == NUM_STEPS * shape.num_pipelines * shape.num_microbatches
        for step in range(1, NUM_STEPS + 1):
            gradients = dict(of_kind(pair.product, f"gradient/{step}/"))
            assert f"gradient/{step}/embedding/embedding.word_embeddings.weight" in gradients
            assert all(bool(gradient.any()) for gradient in gradients.values())
        kinds = {name.rpartition("/")[2] for name, _ in of_kind(pair.product, "state/")}
        assert kinds == {"parameter", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_megatron_refuses_what_the_rule_says(num_stages: int, shape_runs: ShapeRuns) -> None:
    """What the rule does not refuse is trained above."""
    counts = range(1, MOST_MICROBATCHES + 1)
    expected = {
        (m, n): error
        for m in counts
        for n in (*counts, MOST_MICROBATCHES + 1)
        if (error := refusal(num_stages, m, n)) is not None
    }
    assert set(expected.values()) == {ValueError, RuntimeError}
    for raised in shape_runs.refusals(Shape(num_stages, 2, 1), list(expected)):
        assert len(raised) == len(expected)
        for error, text in zip(expected.values(), raised, strict=True):
            assert text.startswith(MESSAGES[error])
