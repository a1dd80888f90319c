"""A script's samples, from its own dataset provider, with indices that are built once.

Megatron-core builds three index files (document order, sample boundaries, shuffle) the first time
a dataset is opened, and its rank 0 does so while the others wait in a barrier. Here no worker is
special and there is no world group: ``prepare_datasets`` builds the indices once before any
worker starts, and ``build_datasets`` only loads them. What sample ``i`` holds depends on the
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

from megatron_bamboo.data.data_files import Part, check_data_files, has_samples
from megatron_bamboo.data.tokenizer import GPT2BPETokenizer
from megatron_bamboo.errors import UserError

OpenDatasets = Callable[[Path], "Sequence[Dataset[Any] | None]"]
"""Opens the training, validation and test samples, with index files in the folder given; None or
nothing for what is not wanted."""


@dataclass(frozen=True, slots=True)
class Datasets:
    """The samples of a run."""

    train: "Dataset[Any]"
    validation: "Dataset[Any] | None"
    """None where nothing is evaluated."""
    test: "Dataset[Any] | None"
    """None where nothing is evaluated, or there is no test part."""


CACHE_FORMAT = 1
_WHOLE = "1"
"""As a split: all documents are for training."""


@dataclass(frozen=True, slots=True)
class DataNeeds:
    """What decides the content of the samples, and where the indices are kept."""

    data_path: str  # the prefix: files are data_path + ".bin" and ".idx"
    sequence_length: int
    seed: int
    num_samples: int  # train iterations times global batch size
    num_validation_samples: int = 0
    num_test_samples: int = 0
    split: str = "969,30,1"  # weights of train, validation and test, by documents
    paths_apart: tuple[str | None, str | None] | None = None
    """Prefixes of validation and test samples, where these are no parts of the same files."""
    cache_path: str | None = None  # beside the data if None

    def cache_folder(self) -> Path:
        """A folder of its own for each thing that the indices depend on."""
        digest = _digest(self.data_path)
        key = (CACHE_FORMAT, self.data_path, digest, self.sequence_length, self.seed)
        # What nobody evaluates leaves the folder that it always had.
        evaluated = [self.num_validation_samples, self.num_test_samples]
        more: list[object] = [*evaluated] if any(evaluated) else []
        if self.paths_apart is not None:
            more.append([path and (path, _digest(path)) for path in self.paths_apart])
        text = json.dumps([*key, self.num_samples, self.split, *more])
        root = Path(self.cache_path) if self.cache_path else Path(f"{self.data_path}_cache")
        return root / hashlib.sha256(text.encode()).hexdigest()[:24]

    def asked_for(self) -> tuple[int, int, int]:
        """Numbers of training, validation and test samples; no test where good files have no sample
        for one."""
        num_test = self.num_test_samples if self.num_test_samples and self._has_test() else 0
        return self.num_samples, self.num_validation_samples, num_test

    def _has_test(self) -> bool:
        if self.paths_apart is None:
            return has_samples(self.data_path, self.split, self.sequence_length, Part.TEST)
        path = self.paths_apart[1]
        return path is not None and has_samples(path, _WHOLE, self.sequence_length, Part.TRAINING)


def prepare_datasets(
    needs: DataNeeds, tokenizer: GPT2BPETokenizer, open_datasets: OpenDatasets
) -> Datasets:
    """Check the data, build its indices unless they are there, and open the samples.

    The indices are built in a scratch folder and renamed, so that a folder under its final name
    is whole even if several jobs prepare at once or one is killed.
    """
    _check(needs, tokenizer)
    folder = needs.cache_folder()
    if not folder.is_dir():
        with _scratch_folder(folder) as scratch:
            open_datasets(scratch)
            _rename_unless_there(scratch, folder)
    return build_datasets(needs, open_datasets)


def _check(needs: DataNeeds, tokenizer: GPT2BPETokenizer) -> None:
    is_validated, length = needs.num_validation_samples > 0, needs.sequence_length
    if needs.paths_apart is None:
        parts = (Part.TRAINING, *[Part.VALIDATION] * is_validated)
        check_data_files(needs.data_path, needs.split, length, tokenizer, parts)
        return
    validation, test = needs.paths_apart
    others = [validation] * is_validated + [test] * (needs.num_test_samples > 0)
    for path in (needs.data_path, *filter(None, others)):
        check_data_files(path, _WHOLE, length, tokenizer)


def build_datasets(needs: DataNeeds, open_datasets: OpenDatasets) -> Datasets:
    """Open the samples with the indices that ``prepare_datasets`` built.

    Needs no process group; with a default group of size 1 it works as well.

    Raises:
        UserError: there are no indices, a dataset that is needed is missing or has too few samples.
    """
    folder = needs.cache_folder()
    if not folder.is_dir():
        raise UserError(f"the indices of {needs.data_path} are not prepared: no {folder}")
    given = open_datasets(folder) or ()
    found = [given[part] if part < len(given) else None for part in Part]
    _, num_validation, num_test = needs.asked_for()
    train = _checked(found[Part.TRAINING], Part.TRAINING, needs.num_samples)
    validation = test = None
    if num_validation:
        validation = _checked(found[Part.VALIDATION], Part.VALIDATION, num_validation)
    if num_test and found[Part.TEST] is not None:
        test = _checked(found[Part.TEST], Part.TEST, num_test)
    return Datasets(train, validation, test)


def _checked(dataset: "Dataset[Any] | None", part: Part, num_samples: int) -> "Dataset[Any]":
    """A dataset that has so many samples."""
    if dataset is None:
        raise UserError(f"the datasets provider gave no {part} dataset")
    if (size := _size(dataset, part)) < num_samples:
        flags = "--train-iters" if part is Part.TRAINING else "--eval-iters"
        raise UserError(
            f"the {part} dataset has {size} samples, the run takes {num_samples}: lower {flags} or "
            "--global-batch-size"
        )
    return dataset


def read_microbatch(dataset: "Dataset[Any]", indices: Sequence[int]) -> Any:
    """One microbatch: the samples of these indices, stacked as torch's data loader does.

    Of Megatron's ``GPTDataset``: tokens, labels, loss_mask, position_ids, each (batch, sequence);
    with an attention mask in the samples its shape is (batch, 1, sequence, sequence).
    """
    return default_collate([dataset[index] for index in indices])


def _digest(data_path: str) -> str:
    return hashlib.sha256(Path(f"{data_path}.idx").read_bytes()).hexdigest()


def _size(dataset: "Dataset[Any]", part: Part) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(
            f"the {part} dataset has no length: give one whose samples have numbers, as "
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
