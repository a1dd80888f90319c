"""The product's and Megatron-core's trainings of small shapes, each done once a session."""

import json
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from processes import run_processes
from shapes import Shape
from trained_stages import Job, Run, StageTensors, load_stages

# A rank of Megatron trains up to 19 shapes in a row.
FAMILY_SECONDS = 300

# All steps have a learning rate. Adam's usual epsilon would make whole steps of gradients that are
# nothing but rounding, as those of the keys' biases are; with this one rounding stays rounding.
FLAGS = ("--lr-warmup-iters", "0", "--adam-eps", "1e-3")
NUM_STEPS = 3


class ShapeRuns:
    """Trains what it is asked for, and keeps what the product left for who asks again."""

    def __init__(
        self, context: ForkServerContext, folder: Path, data_flags: tuple[str, ...]
    ) -> None:
        self._context = context
        self._folder = folder
        self._data_flags = data_flags
        self._num_folders = 0
        self._by_product: dict[Shape, dict[str, StageTensors]] = {}

    def by_product(self, shape: Shape) -> dict[str, StageTensors]:
        """The training by the product, one worker a stage."""
        if shape not in self._by_product:
            job = self._job(shape, self._make_folder())
            result = Path(job.folder) / "product"
            run_processes(self._context, job, "product_side", "train_job", [(job, result)])
            self._by_product[shape] = load_stages(result)
        return self._by_product[shape]

    def by_megatron(
        self, groups: Mapping[Shape, Sequence[int]], is_patched: bool = False
    ) -> dict[tuple[Shape, int], dict[str, StageTensors]]:
        """Trainings by Megatron of shapes of one family, each with several sizes of groups.

        Args:
            is_patched: whether the product's schedule stands in for Megatron's.
        """
        folder = self._make_folder()
        runs = {
            (shape, size): Run(
                self._job(shape, folder),
                folder / f"{shape}-{size}",
                None if size == shape.num_stages else size,
                is_patched=is_patched,
            )
            for shape, sizes in groups.items()
            for size in sizes
        }
        self._run_ranks(list(runs.values()))
        return {key: load_stages(run.result) for key, run in runs.items()}

    def in_one_process(
        self, shapes: Sequence[Shape], weights: tuple[float, ...] = ()
    ) -> dict[Shape, StageTensors]:
        """Trainings of the uncut models by Megatron, on the shapes' whole batches.

        Args:
            weights: what each microbatch of the batch counts, where it is not 1.
        """
        folder = self._make_folder()
        runs = {
            shape: Run(
                self._job(shape, folder).in_one_process(), folder / str(shape), weights=weights
            )
            for shape in shapes
        }
        self._run_ranks(list(runs.values()))
        return {shape: next(iter(load_stages(run.result).values())) for shape, run in runs.items()}

    def refusals(self, family: Shape, numbers: Sequence[tuple[int, int]]) -> list[list[str]]:
        """By rank, what Megatron raises for microbatches in groups, all of which it refuses."""
        job = self._job(family, self._make_folder())
        noted = Path(job.folder) / "refusals"
        ranks = range(job.num_workers)
        self._run(job, "prepare_data", [([job],)])
        self._run(job, "note_refusals", [(job, rank, numbers, noted) for rank in ranks])
        return [json.loads(noted.with_suffix(f".{rank}").read_text()) for rank in ranks]

    def _job(self, shape: Shape, folder: Path) -> Job:
        return Job(
            shape.num_stages,
            shape.num_pipelines,
            shape.num_microbatches,
            str(folder),
            self._data_flags,
            FLAGS,
            num_chunks=shape.num_chunks,
            num_layers=shape.num_stages * shape.num_chunks,
            num_steps=NUM_STEPS,
        )

    def _make_folder(self) -> Path:
        self._num_folders += 1
        folder = self._folder / str(self._num_folders)
        folder.mkdir()
        return folder

    def _run_ranks(self, runs: Sequence[Run]) -> None:
        jobs = [run.job for run in runs]
        self._run(jobs[0], "prepare_data", [(jobs,)])
        self._run(jobs[0], "train_rank", [(runs, rank) for rank in range(jobs[0].num_workers)])

    def _run(self, job: Job, function: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        side = (self._context, job, "megatron_side")
        run_processes(*side, function, arguments, seconds=FAMILY_SECONDS)
