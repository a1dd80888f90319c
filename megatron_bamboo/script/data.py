"""A script's training samples, with the index files of its data in a folder of their own."""

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from megatron_bamboo.config import Layout, Options
from megatron_bamboo.data.gpt_dataset import (
    OpenDataset,
    TrainDataOptions,
    build_train_dataset,
    prepare_train_dataset,
)
from megatron_bamboo.model.place import first_worker
from megatron_bamboo.script.providers import DatasetsProvider
from megatron_bamboo.script.state import get_args, get_tokenizer


def prepare_data(provider: DatasetsProvider, options: Options, layout: Layout) -> "Dataset[Any]":
    """Check the data, build its indices, and open the training samples."""
    data = _data_options(options, layout)
    return prepare_train_dataset(data, get_tokenizer(), _opener(provider, data.num_samples))


def open_train_dataset(
    provider: DatasetsProvider, options: Options, layout: Layout
) -> "Dataset[Any]":
    """The training samples, whose indices are prepared."""
    data = _data_options(options, layout)
    return build_train_dataset(data, _opener(provider, data.num_samples))


def index_folder(options: Options, layout: Layout) -> Path:
    """Where the indices of these samples are."""
    return _data_options(options, layout).cache_folder()


def _opener(provider: DatasetsProvider, num_samples: int) -> OpenDataset:
    def open_dataset(cache_folder: Path) -> "Dataset[Any] | None":
        get_args().data_cache_path = str(cache_folder)
        # Any worker may come to read data: a shadow, or one that shares a stage's layers.
        with first_worker():
            # Nothing is evaluated yet: no samples of the other two splits.
            datasets = provider((num_samples, 0, 0))
        return datasets[0] if datasets else None

    return open_dataset


def _data_options(options: Options, layout: Layout) -> TrainDataOptions:
    """As many samples as all steps take."""
    return TrainDataOptions(
        data_path=options.data.data_path,
        sequence_length=options.data.seq_length,
        seed=options.training.seed,
        num_samples=options.training.train_iters * layout.global_batch_size,
        split=options.data.split,
        cache_path=options.data.data_cache_path,
    )
