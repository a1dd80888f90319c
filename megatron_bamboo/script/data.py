"""A script's samples, with the index files of its data in a folder of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from megatron_bamboo.config import Layout, Options
from megatron_bamboo.data.gpt_dataset import (
    DataNeeds,
    Datasets,
    OpenDatasets,
    build_datasets,
    prepare_datasets,
)
from megatron_bamboo.model.place import first_worker
from megatron_bamboo.script.providers import DatasetsProvider
from megatron_bamboo.script.state import get_args, get_tokenizer


def prepare_data(provider: DatasetsProvider, options: Options, layout: Layout) -> Datasets:
    """Check the data, build its indices, and open the samples."""
    needs = _needs(options, layout)
    return prepare_datasets(needs, get_tokenizer(), _opener(provider, needs))


def open_data(provider: DatasetsProvider, options: Options, layout: Layout) -> Datasets:
    """The samples, whose indices are prepared."""
    needs = _needs(options, layout)
    return build_datasets(needs, _opener(provider, needs))


def index_folder(options: Options, layout: Layout) -> Path:
    """Where the indices of these samples are."""
    return _needs(options, layout).cache_folder()


def _opener(provider: DatasetsProvider, needs: DataNeeds) -> OpenDatasets:
    def open_datasets(cache_folder: Path) -> "Sequence[Dataset[Any] | None]":
        get_args().data_cache_path = str(cache_folder)
        # Any worker may come to read data: a shadow, or one that shares a stage's layers.
        with first_worker():
            datasets: Sequence[Dataset[Any] | None] = provider(needs.asked_for())
        return datasets

    return open_datasets


def _needs(options: Options, layout: Layout) -> DataNeeds:
    """As many samples as all steps and evaluations take."""
    evaluations, batch = options.evaluations, layout.global_batch_size
    return DataNeeds(
        data_path=options.data.training_prefix,
        paths_apart=options.data.prefixes_apart,
        sequence_length=options.data.seq_length,
        seed=options.training.seed,
        num_samples=options.training.train_iters * batch,
        num_validation_samples=evaluations.validation_batches * batch,
        num_test_samples=evaluations.test_batches * batch,
        split=options.data.split,
        cache_path=options.data.data_cache_path,
    )
