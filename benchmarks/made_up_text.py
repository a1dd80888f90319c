"""Text, vocabulary and token files for trainings whose time counts and not what they learn."""

import contextlib
import json
import random
import sys
from itertools import product
from pathlib import Path

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.data import train_tokenizer


def prepare_data(folder: Path) -> tuple[str, ...]:
    """Write the files; the flags that name them."""
    corpus = folder / "corpus.jsonl"
    words = [f"{stem}{end}" for stem, end in product(("wa", "lo", "ti"), ("ren", "mp", "s", "ke"))]
    draw = random.Random(1)
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=200))}) for _ in range(50)]
    corpus.write_text("\n".join(lines) + "\n")
    files = ["--input", str(corpus), "--vocab-size", "300", "--output-dir", str(folder)]
    names = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    command = ["preprocess", "--input", str(corpus), "--output-prefix", str(folder / "text")]
    with contextlib.redirect_stdout(sys.stderr):
        assert train_tokenizer.main(files) == 0
        assert bamboo([*command, *names, "--append-eod"]) == 0
    return ("--data-path", str(folder / "text_text_document"), "--split", "100,0,0", *names)
