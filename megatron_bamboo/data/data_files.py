"""Checks of a ``.bin`` and ``.idx`` pair before anything trains on it.

Megatron-core asserts some of this in the middle of a worker, and some not at all: an empty split
makes it count epochs for ever, a truncated file ends in tracebacks, and tokens of another
vocabulary in an index error of the embedding. Here each is one line before any worker starts.
"""

import re
import struct
from pathlib import Path

import numpy

from megatron_bamboo.data.tokenizer import GPT2BPETokenizer
from megatron_bamboo.errors import UserError
from megatron_bamboo.quiet import quiet_megatron_import

with quiet_megatron_import():
    from megatron.core.datasets.indexed_dataset import IndexedDataset

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, number of sequences, of documents
SPLIT_FORM = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}")
TOKENS_CHECKED = 1 << 26  # enough to see a wrong vocabulary, and a fraction of a second to read


def check_data_files(
    data_path: str, split: str, sequence_length: int, tokenizer: GPT2BPETokenizer
) -> None:
    """A UserError for anything in the files or the split that could not train."""
    _check_split(split)
    _check_presence(data_path)
    _check_index(data_path)
    if Path(f"{data_path}.bin").stat().st_size == 0:
        raise UserError(f"--data-path: {data_path}.bin is empty")
    dataset = IndexedDataset(data_path)
    _check_tokens_size(data_path, _num_tokens(dataset, len(dataset)) * dataset.index.dtype_size)
    _check_train_length(dataset, data_path, split, sequence_length)
    _check_tokens(dataset, data_path, tokenizer)


def _check_split(split: str) -> None:
    if not SPLIT_FORM.fullmatch(split) or float(split.split(",")[0]) == 0:
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
        _, _, _, num_sequences, num_documents = HEADER.unpack(head)
        # A length and an offset for each sequence, the first sequence of each document.
        if path.stat().st_size == HEADER.size + num_sequences * (4 + 8) + num_documents * 8:
            return
    raise UserError(f"--data-path: {path} is cut short; run `bamboo preprocess` again")


def _check_tokens_size(data_path: str, num_bytes: int) -> None:
    actual = Path(f"{data_path}.bin").stat().st_size
    if actual != num_bytes:
        raise UserError(
            f"--data-path: {data_path}.bin has {actual} bytes, but its index tells of {num_bytes}; "
            "run `bamboo preprocess` again"
        )


def _check_train_length(
    dataset: IndexedDataset, data_path: str, split: str, sequence_length: int
) -> None:
    weights = [float(weight) for weight in split.split(",")]
    num_sequences = round(weights[0] / sum(weights) * len(dataset))
    num_tokens = _num_tokens(dataset, num_sequences)
    if num_tokens <= sequence_length:
        raise UserError(
            f"--data-path: the training part of {data_path} has {num_tokens} tokens, too few for "
            f"one sample of --seq-length {sequence_length}"
        )


def _num_tokens(dataset: IndexedDataset, num_sequences: int) -> int:
    return int(dataset.sequence_lengths[:num_sequences].sum(dtype=numpy.int64))


def _check_tokens(dataset: IndexedDataset, data_path: str, tokenizer: GPT2BPETokenizer) -> None:
    head = numpy.fromfile(f"{data_path}.bin", dataset.index.dtype, TOKENS_CHECKED)
    if (largest := int(head.max())) >= tokenizer.vocab_size:
        raise UserError(
            f"--data-path: {data_path} holds token {largest}, but the vocabulary ends at "
            f"{tokenizer.vocab_size - 1}; it was made with another --vocab-file"
        )
