"""The training samples, from a script's own dataset provider, with indices that are built once.

Megatron-core builds three index files (document order, sample boundaries, shuffle) the first time
a dataset is opened, and its rank 0 does so while the others wait in a barrier. Here no worker is
special and there is no world group: ``prepare_train_dataset`` builds the indices once before any
worker starts, and ``build_train_dataset`` only loads them. What sample ``i`` holds depends on the
files, the seed, the sequence length and the number of samples asked for: never on a layout.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, default_collate

from megatron_bamboo.data.data_files import check_data_files
from megatron_bamboo.data.tokenizer import GPT2BPETokenizer
from megatron_bamboo.errors import UserError

OpenDataset = Callable[[Path], "Dataset[Any] | None"]
"""Opens the training samples, with index files in the folder given."""

CACHE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TrainDataOptions:
    """What decides the content of the training samples, and where the indices are kept."""

    data_path: str  # the prefix: files are data_path + ".bin" and ".idx"
    sequence_length: int
    seed: int
    num_samples: int  # train iterations times global batch size
    split: str = "969,30,1"  # weights of train, validation and test, by documents
    cache_path: str | None = None  # beside the data if None

    def cache_folder(self) -> Path:
        """A folder of its own for each thing that the indices depend on."""
        digest = hashlib.sha256(Path(f"{self.data_path}.idx").read_bytes()).hexdigest()
        key = (CACHE_FORMAT, self.data_path, digest, self.sequence_length, self.seed)
        text = json.dumps([*key, self.num_samples, self.split])
        root = Path(self.cache_path) if self.cache_path else Path(f"{self.data_path}_cache")
        return root / hashlib.sha256(text.encode()).hexdigest()[:24]


def prepare_train_dataset(
    options: TrainDataOptions, tokenizer: GPT2BPETokenizer, open_dataset: OpenDataset
) -> "Dataset[Any]":
    """Check the data, build its indices unless they are there, and open the samples.

    The indices are built in a scratch folder and renamed, so that a folder under its final name
    is whole even if several jobs prepare at once or one is killed.
    """
    check_data_files(options.data_path, options.split, options.sequence_length, tokenizer)
    folder = options.cache_folder()
    if not folder.is_dir():
        with _scratch_folder(folder) as scratch:
            open_dataset(scratch)
            _rename_unless_there(scratch, folder)
    return build_train_dataset(options, open_dataset)


def build_train_dataset(options: TrainDataOptions, open_dataset: OpenDataset) -> "Dataset[Any]":
    """Open the training samples with the indices that ``prepare_train_dataset`` built.

    Needs no process group; with a default group of size 1 it works as well.

    Raises:
        UserError: there are no indices, no training dataset, or too few samples.
    """
    folder = options.cache_folder()
    if not folder.is_dir():
        raise UserError(f"the indices of {options.data_path} are not prepared: no {folder}")
    dataset = open_dataset(folder)
    if dataset is None:
        raise UserError("the datasets provider gave no training dataset")
    if _size(dataset) < options.num_samples:
        raise UserError(
            f"the training dataset has {_size(dataset)} samples, the run takes "
            f"{options.num_samples}: lower --train-iters or --global-batch-size"
        )
    return dataset


def read_microbatch(dataset: "Dataset[Any]", indices: Sequence[int]) -> Any:
    """One microbatch: the samples of these indices, stacked as torch's data loader does.

    Of Megatron's ``GPTDataset``: tokens, labels, loss_mask, position_ids, each (batch, sequence);
    with an attention mask in the samples its shape is (batch, 1, sequence, sequence).
    """
    return default_collate([dataset[index] for index in indices])


def _size(dataset: "Dataset[Any]") -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(
            "the training dataset has no length: give one whose samples have numbers, as "
            "torch.utils.data.Dataset"
        ) from None


@contextmanager
def _scratch_folder(final: Path) -> Iterator[Path]:
    scratch = final.with_name(f".{final.name}-{secrets.token_hex(8)}")
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"cannot write indices to {final.parent} ({error.strerror}); "
            "name another folder with --data-cache-path"
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _rename_unless_there(scratch: Path, final: Path) -> None:
    try:
        os.rename(scratch, final)
    except OSError:
        if not final.is_dir():  # otherwise another job was faster, with the same content
            raise
