"""How many pipelines there are, of which stages, and what work each has: no nodes yet.

A stage is a range of the model's units in their order: the embedding, the layers, the head. What
node takes which place comes later, so that the same arrangement can be put on any live nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

StageSpan = tuple[int, int]
"""The first unit of a stage, and the one past its last."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The stages of one pipeline in their order, and its share of the global batch.

    Raises:
        ValueError: the stages do not hold each unit once and in order, or there is no work.
    """

    spans: tuple[StageSpan, ...]
    """Of each chunk of each stage: chunk c of stage s is the one at c * stages + s."""
    num_microbatches: int
    """0: it is dissolved, and only its number is kept."""
    num_chunks: int = 1
    """Of each stage."""

    def __post_init__(self) -> None:
        check_spans(self.spans)
        if self.num_microbatches < 0:
            raise ValueError(f"a pipeline has {self.num_microbatches} microbatches: give it one")
        if self.num_chunks < 1 or len(self.spans) % self.num_chunks:
            raise ValueError(f"{len(self.spans)} spans are not {self.num_chunks} for each stage")

    @property
    def num_stages(self) -> int:
        """Each on a node of its own."""
        return len(self.spans) // self.num_chunks

    @property
    def num_units(self) -> int:
        """All that the model has."""
        return self.spans[-1][1]

    def spans_of(self, stage: int) -> tuple[StageSpan, ...]:
        """The units of each chunk of a stage."""
        return self.spans[stage :: self.num_stages]

    def stage_of(self, unit: str) -> int:
        """The stage that a unit belongs to."""
        number = unit_names(self.num_units).index(unit)
        place = next(place for place, (_, past) in enumerate(self.spans) if number < past)
        return place % self.num_stages

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The shape whose fields JSON has kept."""
        spans = tuple((int(first), int(past)) for first, past in values["spans"])
        return cls(spans, int(values["num_microbatches"]), int(values["num_chunks"]))


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

    @property
    def total_microbatches(self) -> int:
        """Those of one step."""
        return sum(self.microbatches)

    @property
    def is_cut_alike(self) -> bool:
        """Whether a stage has the same units in all pipelines."""
        return len({(pipeline.spans, pipeline.num_chunks) for pipeline in self.pipelines}) == 1

    def stages_of(self, unit: str) -> tuple[int, ...]:
        """By pipeline the stage that a unit belongs to."""
        return tuple(pipeline.stage_of(unit) for pipeline in self.pipelines)

    def places(self) -> tuple[tuple[int, ...], ...]:
        """Each different answer of ``stages_of``, in the order of the units."""
        return tuple(dict.fromkeys(map(self.stages_of, unit_names(self.num_units))))

    def global_microbatches(self, pipeline: int) -> tuple[int, ...]:
        """The numbers that a pipeline's microbatches have among those of all.

        They are dealt out in turn to the pipelines that have some left to get. So each sample and
        each dropout mask belongs to one place in the global batch, whoever computes it.
        """
        before, counts = self.microbatches[:pipeline], self.microbatches
        return tuple(
            sum(min(count, own) for count in counts) + sum(count > own for count in before)
            for own in range(counts[pipeline])
        )

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The arrangement whose fields JSON has kept."""
        return cls(tuple(map(PipelineShape.from_fields, values["pipelines"])))


def equal_pipelines(
    num_stages: int,
    num_pipelines: int,
    num_microbatches: int,
    layers_per_chunk: int = 1,
    num_chunks: int = 1,
) -> Arrangement:
    """Pipelines that are all alike, each chunk with as many layers.

    Args:
        num_microbatches: of each pipeline.
        num_chunks: of each stage.
    """
    layers = (layers_per_chunk,) * (num_stages * num_chunks)
    shape = PipelineShape(spans_of_layers(layers), num_microbatches, num_chunks)
    return Arrangement((shape,) * num_pipelines)


def spans_of_layers(layers: Sequence[int]) -> tuple[StageSpan, ...]:
    """The spans of so many layers each, the embedding being with the first, the head the last."""
    ends = [1 + sum(layers[: place + 1]) for place in range(len(layers))]
    ends[-1] += 1
    return tuple(zip([0, *ends], ends, strict=False))


def unit_names(num_units: int) -> tuple[str, ...]:
    """The units of a model in their order."""
    return ("embedding", *(f"layer{number}" for number in range(num_units - 2)), "head")


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
