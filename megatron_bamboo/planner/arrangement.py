"""How many pipelines there are, of which stages, and what work each has: no nodes yet.

A stage is a range of the model's units in their order: the embedding, the layers, the head. What
node takes which place comes later, so that the same arrangement can be put on any live nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

StageSpan = tuple[int, int]
"""The first unit of a stage, and the one past its last."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The stages of one pipeline in their order, and its share of the global batch.

    Raises:
        ValueError: the stages do not hold each unit once and in order, or there is no work.
    """

    spans: tuple[StageSpan, ...]
    num_microbatches: int

    def __post_init__(self) -> None:
        check_spans(self.spans)
        if self.num_microbatches < 1:
            raise ValueError(f"a pipeline has {self.num_microbatches} microbatches: give it one")

    @property
    def num_stages(self) -> int:
        """Each on a node of its own."""
        return len(self.spans)

    @property
    def num_units(self) -> int:
        """All that the model has."""
        return self.spans[-1][1]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The pipelines that train one model together.

    Raises:
        ValueError: there is none, or they are cuts of different models.
    """

    pipelines: tuple[PipelineShape, ...]

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ValueError("an arrangement needs a pipeline")
        sizes = sorted({pipeline.num_units for pipeline in self.pipelines})
        if len(sizes) > 1:
            raise ValueError(f"the pipelines have {sizes} units: all need those of one model")

    @property
    def num_nodes(self) -> int:
        """One for each stage."""
        return sum(pipeline.num_stages for pipeline in self.pipelines)

    @property
    def num_units(self) -> int:
        """All that the model has."""
        return self.pipelines[0].num_units

    @property
    def microbatches(self) -> tuple[int, ...]:
        """By pipeline."""
        return tuple(pipeline.num_microbatches for pipeline in self.pipelines)


def check_spans(spans: Sequence[StageSpan]) -> None:
    """Refuse stages that do not hold each unit once and in order.

    Raises:
        ValueError: naming the first stage that is wrong.
    """
    if not spans:
        raise ValueError("a pipeline needs a stage")
    end = 0
    for stage, (first, past) in enumerate(spans):
        if first != end:
            raise ValueError(f"stage {stage} begins with unit {first}, not {end}")
        if past <= first:
            raise ValueError(f"stage {stage} has no unit: it is [{first}, {past})")
        end = past
