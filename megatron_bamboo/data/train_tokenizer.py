"""Train a GPT-2 style vocabulary on JSON lines.

``python -m megatron_bamboo.data.train_tokenizer --input FILE --vocab-size N --output-dir DIR``
writes ``vocab.json`` and ``merges.txt``, the files that Megatron's ``--vocab-file`` and
``--merge-file`` name. As in GPT-2 the 256 bytes come first and ``<|endoftext|>`` last, so that
every text can be encoded.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megatron_bamboo.data.bpe import END_OF_DOCUMENT, make_bpe
from megatron_bamboo.data.json_lines import read_lines, texts_of_line
from megatron_bamboo.errors import UserError

SMALLEST_VOCABULARY = 257  # the bytes and the end token


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A vocabulary of at most ``vocab_size`` ids, one of them left for the end token."""
    tokenizer = make_bpe(BPE())
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_bpe(tokenizer: Tokenizer, output_dir: Path) -> None:
    """Write ``vocab.json``, ids ascending and the end token last, and ``merges.txt``."""
    output_dir.mkdir(parents=True, exist_ok=True)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    vocab[END_OF_DOCUMENT] = len(vocab)
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    _write_whole(output_dir / "vocab.json", json.dumps(vocab, ensure_ascii=False))
    _write_whole(output_dir / "merges.txt", "#version: 0.2\n" + merges)


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def corpus_texts(path: Path, key: str) -> Iterator[str]:
    """Every text under one key."""
    for where, line in read_lines(path):
        yield from texts_of_line(where, line, (key,))[key]


def main(argv: Sequence[str] | None = None) -> int:
    """Train and save; exit status 2 for input that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_bamboo.data.train_tokenizer",
        description="Train a GPT-2 style byte-pair vocabulary on JSON lines.",
    )
    parser.add_argument("--input", type=Path, required=True, help="JSON lines to train on")
    parser.add_argument("--json-key", default="text", help="key of the text (default: text)")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of ids wanted")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the two files")
    args = parser.parse_args(argv)
    try:
        if args.vocab_size < SMALLEST_VOCABULARY:
            raise UserError(f"--vocab-size must be at least {SMALLEST_VOCABULARY}")
        # Read first: an error raised inside of the library's iterator loses its type.
        texts = list(corpus_texts(args.input, args.json_key))
    except UserError as error:
        sys.stderr.write(f"train_tokenizer: {error}\n")
        return 2
    tokenizer = train_bpe(iter(texts), args.vocab_size)
    save_bpe(tokenizer, args.output_dir)
    sys.stderr.write(f"{args.output_dir}: {tokenizer.get_vocab_size() + 1} tokens\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
