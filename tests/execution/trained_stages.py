"""What one run leaves for the parity tests, and the job that all sides run.

A file for each stage of each pipeline, its tensors named by what they are:
``loss/<step>/<global microbatch>`` (the last stage's), ``gradient/<step>/<unit>/<parameter>`` after
the reduction, and ``state/<unit>/<parameter>/<kind>`` after the last step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_bamboo.config import Layout, Options, check_options, parse_options

StageTensors = dict[str, Tensor]
Stages = Mapping[str, StageTensors]


@dataclass(frozen=True, slots=True)
class Job:
    """P stages of C chunks, D pipelines and M microbatches in each."""

    num_stages: int
    num_pipelines: int
    num_microbatches: int
    folder: str
    data_flags: tuple[str, ...]
    more_flags: tuple[str, ...] = ()
    num_chunks: int = 1
    num_layers: int = 4
    num_steps: int = 4

    @property
    def num_workers(self) -> int:
        """One worker a stage."""
        return self.num_stages * self.num_pipelines

    @property
    def job_dir(self) -> Path:
        """What the product's run leaves."""
        return Path(self.folder) / "job"

    @property
    def rendezvous(self) -> Path:
        """Where Megatron's ranks find each other."""
        return Path(self.folder) / "rendezvous"

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags: no dropout, no clipping, a learning rate that changes each step."""
        batch = 2 * self.num_pipelines * self.num_microbatches
        layers_per_chunk = self.num_layers // (self.num_stages * self.num_chunks)
        return (
            *("--num-layers", str(self.num_layers)),
            *("--hidden-size", "32", "--num-attention-heads", "4"),
            *("--num-layers-per-virtual-pipeline-stage", str(layers_per_chunk)),
            *("--seq-length", "16", "--max-position-embeddings", "16"),
            *("--micro-batch-size", "2", "--global-batch-size", str(batch)),
            *("--train-iters", str(self.num_steps)),
            *("--lr", "1e-2", "--min-lr", "1e-4", "--lr-warmup-iters", "1"),
            *("--lr-decay-style", "cosine", "--weight-decay", "0.1", "--clip-grad", "0"),
            *("--attention-dropout", "0", "--hidden-dropout", "0"),
            *("--pipeline-model-parallel-size", str(self.num_stages)),
            *("--bamboo-redundancy", "none", "--distributed-timeout-minutes", "1"),
            *self.data_flags,
            *self.more_flags,
        )

    def options(self) -> tuple[Options, Layout]:
        """The flags, read."""
        options = parse_options(self.flags)
        return options, check_options(options, self.num_workers)

    def global_microbatch(self, microbatch: int, pipeline: int) -> int:
        """Megatron's sampler gives each global microbatch to the next pipeline."""
        return microbatch * self.num_pipelines + pipeline

    def in_one_process(self) -> "Job":
        """The same model on the same batches, uncut."""
        total = self.num_pipelines * self.num_microbatches
        return replace(self, num_stages=1, num_pipelines=1, num_microbatches=total, num_chunks=1)


@dataclass(frozen=True, slots=True)
class Run:
    """One training, and the folder where each rank leaves its stage.

    Args:
        group_size: how many microbatches go through a chunk in a row; Megatron's default if None.
        weights: what each microbatch counts, not 1 where a test wants to see that it is noticed.
        is_patched: whether the product's schedule stands in for Megatron's.
    """

    job: Job
    result: Path
    group_size: int | None = None
    weights: tuple[float, ...] = ()
    is_patched: bool = False


def save_stage(folder: Path, pipeline: int, stage: int, tensors: StageTensors) -> None:
    """Leave one stage's tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / f"pipeline{pipeline}-stage{stage}.safetensors")


def load_stages(folder: Path) -> dict[str, StageTensors]:
    """By pipeline and stage, what ``save_stage`` left."""
    return {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
