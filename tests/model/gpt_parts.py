"""Small GPTs for the tests of the model package, in this process alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_bamboo.config import Layout, Options, check_options, parse_options
from megatron_bamboo.model.gpt import ChunkPlace, Recipe, build_chunk, units_of
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.model.shard import WHOLE, Shard
from megatron_bamboo.model.stage import Stage, build_scheduler, build_stage
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.script.args import make_args
from megatron_bamboo.script.providers import ModelProvider
from megatron_bamboo.script.state import begin
from pretrain_gpt_bamboo import model_provider

VOCAB_SIZE = 128
LAYERS = 4
SEQUENCE = 16


@dataclass(frozen=True, slots=True)
class Gpt:
    """Options, and what a stage is built from."""

    options: Options
    groups: ProcessGroupCollection
    provider: ModelProvider = model_provider

    @property
    def layout(self) -> Layout:
        """One pipeline."""
        return check_options(self.options, self.options.parallel.pipeline_model_parallel_size)

    @property
    def shape(self) -> PipelineShape:
        """That pipeline's."""
        return self.layout.arrangement.pipelines[0]

    def stage(
        self, number: int, dropout: DropoutSeeds | None = None, shard: Shard = WHOLE
    ) -> Stage:
        """A stage with its initial weights."""
        return self.stage_of(number, self.shape, True, dropout, shard)

    def stage_of(
        self,
        number: int,
        shape: PipelineShape,
        draws: bool = True,
        dropout: DropoutSeeds | None = None,
        shard: Shard = WHOLE,
    ) -> Stage:
        """The same, of a pipeline that is cut in another way, with initial weights or without."""
        recipe = self._recipe(dropout)
        return build_stage(number, shape, self.options.optimizer, recipe, shard, draws)

    def trained_stage(self, number: int, shard: Shard = WHOLE) -> Stage:
        """A stage whose optimizer has got its rate and its weight decay, as from a worker."""
        stage = self.stage(number, shard=shard)
        self._make_scheduler(number, stage)
        return stage

    def awaiting_stage(self, number: int, shard: Shard = WHOLE) -> Stage:
        """The same, whose state is to come: until then it has no number that means anything."""
        stage = self.stage_of(number, self.shape, draws=False, shard=shard)
        for chunk in stage.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(math.nan)
        self._make_scheduler(number, stage)
        return stage

    def _make_scheduler(self, number: int, stage: Stage) -> None:
        train, batch = self.options.training, self.layout.global_batch_size
        build_scheduler({number: stage}, self.options.optimizer, train.train_iters, batch)

    def stages(self) -> list[Stage]:
        """All stages of the pipeline."""
        return [self.stage(number) for number in range(self.shape.num_stages)]

    def chunk(
        self, place: ChunkPlace, dropout: DropoutSeeds | None = None, draws: bool = True
    ) -> GPTModel:
        """A chunk of these layers, with initial weights or without."""
        return build_chunk(self._recipe(dropout), place, draws)

    def begin(self) -> None:
        """Set what the script's provider asks for."""
        begin(make_args(self.options, self.layout, VOCAB_SIZE, {}), tokenizer=None)

    def _recipe(self, dropout: DropoutSeeds | None) -> Recipe:
        self.begin()
        seeds = dropout or DropoutSeeds(self.options.training.seed)
        return Recipe.of(self.options, self.provider, self.groups, seeds)

    def weights(self, place: ChunkPlace) -> dict[str, Tensor]:
        """The initial weights of a chunk as ``unit/parameter``."""
        units = units_of(self.chunk(place), place)
        return {
            f"{unit}/{name}": parameter.detach()
            for unit, parts in units.items()
            for name, parameter in parts.named_parameters()
        }


MakeGpt = Callable[..., Gpt]


def cut(num_parts: int) -> list[ChunkPlace]:
    """The layers in equal parts."""
    size = LAYERS // num_parts
    return [
        ChunkPlace(range(part * size, (part + 1) * size), part == 0, part == num_parts - 1)
        for part in range(num_parts)
    ]


def make_options(folder: Path, flags: str = "") -> Options:
    """Flags of a small model without redundancy; the data files are empty ones."""
    for name in ("text.bin", "text.idx", "vocab.json", "merges.txt"):
        (folder / name).touch()
    shape = (
        f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --seq-length {SEQUENCE}"
    )
    more = f"--max-position-embeddings {SEQUENCE} --micro-batch-size 2 --train-iters 10 --lr 1e-2"
    files = f"--data-path {folder}/text --vocab-file {folder}/vocab.json"
    files += f" --merge-file {folder}/merges.txt --bamboo-redundancy none"
    return parse_options(f"{shape} {more} {files} {flags}".split())


def random_tokens(seed: int = 7) -> Tensor:
    """A microbatch of token numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (2, SEQUENCE), generator=generator)


def losses_of(stages: list[Stage], tokens: Tensor) -> Tensor:
    """One forward pass through a pipeline: the mean loss of predicting the next token."""
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    labels = tokens.roll(-1, dims=1)
    output: Tensor | None = None
    for number, stage in enumerate(stages):
        (chunk,) = stage.chunks
        chunk.set_input_tensor(output)
        is_last = number == len(stages) - 1
        output = chunk(tokens, positions, attention_mask=None, labels=labels if is_last else None)
    assert output is not None
    return output.mean()
