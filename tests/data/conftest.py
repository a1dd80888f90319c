"""One small corpus, vocabulary and indexed dataset, made once."""

import json

import pytest
from prepared_data import Prepared

from megatron_bamboo.data import train_tokenizer


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("data")
    corpus = folder / "corpus.jsonl"
    lines = [
        json.dumps({"text": f"Document {n}: " + "the quick brown fox jumps. " * (n % 7 + 1)})
        for n in range(40)
    ]
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = ["--input", str(corpus), "--vocab-size", "300", "--output-dir", str(folder)]
    assert train_tokenizer.main(arguments) == 0
    made = Prepared(
        corpus, folder / "vocab.json", folder / "merges.txt", str(folder / "my_text_document")
    )
    assert made.preprocess("--append-eod", prefix="my") == 0
    return made
