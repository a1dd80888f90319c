"""Checks of a ``.bin`` and ``.idx`` pair before anything trains on it.

Megatron-core asserts some of this in the middle of a worker, and some not at all: an empty split
makes it count epochs for ever, a truncated file ends in tracebacks, and tokens of another
vocabulary in an index error of the embedding. An index that points elsewhere than its lengths say
trains on other text without a word. Here each is one line before any worker starts.
"""

import math
import re
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy

from megatron_bamboo.data.tokenizer import GPT2BPETokenizer
from megatron_bamboo.errors import UserError
from megatron_bamboo.quiet import quiet_megatron_import

with quiet_megatron_import():
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, number of sequences, of documents
SPLIT_FORM = re.compile(r"[0-9]+(\.[0-9]+)?(,[0-9]+(\.[0-9]+)?){0,2}")
TOKENS_CHECKED = 1 << 26  # enough to see a wrong vocabulary, and a fraction of a second to read


class Part(IntEnum):
    """A part that ``--split`` makes of the data, by its place there."""

    TRAINING = 0
    VALIDATION = 1
    TEST = 2

    def __str__(self) -> str:
        return self.name.lower()


def check_data_files(
    data_path: str,
    split: str,
    sequence_length: int,
    tokenizer: GPT2BPETokenizer,
    parts: Sequence[Part] = (Part.TRAINING,),
) -> None:
    """A UserError for anything in the files or the split that could not train.

    Args:
        parts: those that must have a sample.
    """
    _check_split(split)
    _check_presence(data_path)
    _check_index(data_path)
    if Path(f"{data_path}.bin").stat().st_size == 0:
        raise UserError(f"--data-path: {data_path}.bin is empty")
    dataset = IndexedDataset(data_path)
    _check_tokens_size(data_path, _num_tokens(dataset, len(dataset)) * dataset.index.dtype_size)
    for part in parts:
        _check_length(dataset, data_path, split, sequence_length, part)
    _check_tokens(dataset, data_path, tokenizer)


def has_samples(data_path: str, split: str, sequence_length: int, part: Part) -> bool:
    """Whether a part of good files has a sample; where it has none Megatron counts for ever."""
    return _num_tokens_in(IndexedDataset(data_path), split, part) > sequence_length


def _check_split(split: str) -> None:
    weights = [float(w) for w in split.split(",")] if SPLIT_FORM.fullmatch(split) else [0.0]
    if weights[0] == 0 or not math.isfinite(sum(weights)):
        raise UserError(
            f"--split must be up to three numbers as in 969,30,1, the first above 0, not {split!r}"
        )


def _check_presence(data_path: str) -> None:
    for suffix in (".bin", ".idx"):
        if not Path(data_path + suffix).is_file():
            raise UserError(
                f"--data-path: no such file: {data_path}{suffix} (give the prefix that "
                "`bamboo preprocess` wrote, without .bin)"
            )


def _check_index(data_path: str) -> None:
    path = Path(f"{data_path}.idx")
    with path.open("rb") as stream:
        head = stream.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise UserError(f"--data-path: {path} is not an index that Megatron wrote")
    if len(head) == HEADER.size:
        _, version, code, num_sequences, num_documents = HEADER.unpack(head)
        _check_kind(path, version, code)
        # A length and an offset for each sequence, the first sequence of each document.
        if path.stat().st_size == HEADER.size + num_sequences * (4 + 8) + num_documents * 8:
            _check_sequences(path, num_sequences, DType.size(code))
            return
    raise UserError(f"--data-path: {path} is cut short; run `bamboo preprocess` again")


def _check_kind(path: Path, version: int, code: int) -> None:
    if version != 1:
        raise UserError(
            f"--data-path: {path} has version {version}, not 1; run `bamboo preprocess` again"
        )
    codes = {kind.value for kind in DType}
    if code not in codes or not numpy.issubdtype(DType.dtype_from_code(code), numpy.integer):
        raise UserError(
            f"--data-path: {path} has tokens of type code {code}, which are no integers; "
            "run `bamboo preprocess` again"
        )


def _check_sequences(path: Path, num_sequences: int, item_size: int) -> None:
    """The arrays of the index must be those that its own lengths imply."""
    raw = numpy.memmap(path, mode="r")[HEADER.size :]
    lengths, pointers, documents = (
        part.view(kind)
        for part, kind in zip(
            numpy.split(raw, (4 * num_sequences, 12 * num_sequences)),
            (numpy.int32, numpy.int64, numpy.int64),
            strict=True,
        )
    )
    sizes = lengths.astype(numpy.int64) * item_size
    if (lengths < 0).any():
        wrong = "has lengths below 0"
    elif pointers[:1].any() or (numpy.diff(pointers) != sizes[:-1]).any():
        wrong = "points to other places than its lengths add up to"
    elif not _are_documents(documents, num_sequences):
        wrong = "has documents that do not go from its first to its last sequence"
    else:
        return
    raise UserError(f"--data-path: {path} {wrong}; run `bamboo preprocess` again")


def _are_documents(starts: numpy.ndarray, num_sequences: int) -> bool:
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != num_sequences:
        return False
    return bool((starts[1:] >= starts[:-1]).all())


def _check_tokens_size(data_path: str, num_bytes: int) -> None:
    actual = Path(f"{data_path}.bin").stat().st_size
    if actual != num_bytes:
        raise UserError(
            f"--data-path: {data_path}.bin has {actual} bytes, but its index tells of {num_bytes}; "
            "run `bamboo preprocess` again"
        )


def _check_length(
    dataset: IndexedDataset, data_path: str, split: str, sequence_length: int, part: Part
) -> None:
    num_tokens = _num_tokens_in(dataset, split, part)
    if num_tokens <= sequence_length:
        mend = "" if part is Part.TRAINING else f"; give --split more for {part}"
        raise UserError(
            f"--data-path: the {part} part of {data_path} has {num_tokens} tokens, too few for "
            f"one sample of --seq-length {sequence_length}{mend}"
        )


def _num_tokens_in(dataset: IndexedDataset, split: str, part: Part) -> int:
    weights = [float(weight) for weight in split.split(",")]
    begin, end = (
        round(sum(weights[:number]) / sum(weights) * len(dataset)) for number in (part, part + 1)
    )
    return _num_tokens(dataset, end) - _num_tokens(dataset, begin)


def _num_tokens(dataset: IndexedDataset, num_sequences: int) -> int:
    return int(dataset.sequence_lengths[:num_sequences].sum(dtype=numpy.int64))


def _check_tokens(dataset: IndexedDataset, data_path: str, tokenizer: GPT2BPETokenizer) -> None:
    head = numpy.fromfile(f"{data_path}.bin", dataset.index.dtype, TOKENS_CHECKED)
    if (smallest := int(head.min())) < 0:
        raise UserError(
            f"--data-path: {data_path} holds token {smallest}; run `bamboo preprocess` again"
        )
    if (largest := int(head.max())) >= tokenizer.vocab_size:
        raise UserError(
            f"--data-path: {data_path} holds token {largest}, but the vocabulary ends at "
            f"{tokenizer.vocab_size - 1}; it was made with another --vocab-file"
        )
