"""``bamboo preprocess``: JSON lines to Megatron's ``.bin`` and ``.idx``.

Flags and output names are those of Megatron-LM's ``tools/preprocess_data.py``; the files are
written by Megatron-core's own builder and are the same bytes for any number of workers. Both
files appear under their final names only when they are whole.
"""

import argparse
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_bamboo.data.json_lines import read_lines, texts_of_line
from megatron_bamboo.data.tokenizer import TOKENIZER_TYPES, GPT2BPETokenizer
from megatron_bamboo.errors import UserError
from megatron_bamboo.quiet import quiet_megatron_import

with quiet_megatron_import():
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

logger = logging.getLogger(__name__)

LINES_PER_TASK = 32


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """One key's tokens and the length of each of its sentences."""

    ids: list[int]
    sentence_lengths: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of Megatron-LM's tool, as far as they do something here."""
    parser.add_argument("--input", type=Path, required=True, help="JSON lines to read")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys of the texts")
    parser.add_argument(
        "--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default=TOKENIZER_TYPES[0])
    parser.add_argument("--vocab-file", required=True, help="vocab.json")
    parser.add_argument("--merge-file", required=True, help="merges.txt")
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with <|endoftext|>"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that encode")
    parser.add_argument(
        "--log-interval", type=int, default=1000, help="documents between two progress lines"
    )


def run(args: argparse.Namespace) -> int:
    """Encode the input and write one pair of files for each key."""
    for flag, value in (("--workers", args.workers), ("--log-interval", args.log_interval)):
        if value < 1:
            raise UserError(f"{flag} must be at least 1, not {value}")
    if not args.input.is_file():
        raise UserError(f"--input: no such file: {args.input}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = GPT2BPETokenizer(args.vocab_file, args.merge_file)
    encode = partial(encode_line, tokenizer, tuple(args.json_keys), args.append_eod)
    lines = read_lines(args.input)
    with (
        open_outputs(args.output_prefix, args.json_keys, tokenizer.vocab_size) as builders,
        _mapping(encode, lines, args.workers) as encoded,
    ):
        write_documents(builders, encoded, args.log_interval)
    return 0


def encode_line(
    tokenizer: GPT2BPETokenizer, keys: Sequence[str], append_eod: bool, located: tuple[str, str]
) -> dict[str, EncodedDocument]:
    """The documents of one line; empty sentences vanish and an empty document gets no end."""
    texts = texts_of_line(*located, keys)
    return {key: _encode(tokenizer, append_eod, texts[key]) for key in keys}


def _encode(
    tokenizer: GPT2BPETokenizer, append_eod: bool, sentences: Sequence[str]
) -> EncodedDocument:
    pieces = [ids for ids in map(tokenizer.tokenize, sentences) if ids]
    if pieces and append_eod:
        pieces[-1].append(tokenizer.eod)
    return EncodedDocument([token for ids in pieces for token in ids], [len(ids) for ids in pieces])


@contextmanager
def _mapping(encode: partial, lines: Iterator[tuple[str, str]], workers: int) -> Iterator[Iterator]:  # type: ignore[type-arg]
    """``encode`` over the lines in their order, in this process or in several."""
    if workers == 1:
        yield map(encode, lines)
        return
    # Forked, so that the workers need not import Megatron-core again (four seconds each).
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield pool.imap(encode, lines, LINES_PER_TASK)


@contextmanager
def open_outputs(
    prefix: str, keys: Sequence[str], vocab_size: int
) -> Iterator[dict[str, IndexedDatasetBuilder]]:
    """One builder a key; on success the files get their names, on an error they are removed."""
    finals = {key: f"{prefix}_{key}_document" for key in keys}
    try:
        Path(prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
        builders = {
            key: IndexedDatasetBuilder(f"{final}.bin.partial", DType.optimal_dtype(vocab_size))
            for key, final in finals.items()
        }
    except OSError as error:
        raise UserError(f"--output-prefix: cannot write {prefix}: {error.strerror}") from error
    try:
        yield builders
        for key, final in finals.items():
            builders[key].finalize(f"{final}.idx.partial")
        for final in finals.values():
            for suffix in (".bin", ".idx"):
                os.replace(f"{final}{suffix}.partial", f"{final}{suffix}")
    finally:
        for key, final in finals.items():
            builders[key].data_file.close()
            for suffix in (".bin", ".idx"):
                Path(f"{final}{suffix}.partial").unlink(missing_ok=True)


def write_documents(
    builders: dict[str, IndexedDatasetBuilder],
    encoded: Iterator[dict[str, EncodedDocument]],
    log_interval: int,
) -> None:
    """Add all documents; a UserError if there are none or they hold no token."""
    start, count, num_tokens = time.monotonic(), 0, 0
    for count, documents in enumerate(encoded, start=1):
        for key, document in documents.items():
            builders[key].add_document(document.ids, document.sentence_lengths)
            num_tokens += len(document.ids)
        if count % log_interval == 0:
            rate = count / (time.monotonic() - start)
            logger.info("%d documents (%.0f a second)", count, rate)
    if num_tokens == 0:
        raise UserError(f"--input holds no text ({count} documents, all empty)")
    logger.info("%d documents, %d tokens", count, num_tokens)
