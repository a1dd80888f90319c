import json
import subprocess
import sys
from pathlib import Path

import pytest
from prepared_data import Prepared

from megatron_bamboo.data import train_tokenizer
from megatron_bamboo.data.bpe import END_OF_DOCUMENT
from megatron_bamboo.data.tokenizer import GPT2BPETokenizer, padded_vocab_size
from megatron_bamboo.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(prepared: Prepared) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(prepared.vocab_file, prepared.merge_file)


@pytest.mark.parametrize("text", ["The quick fox.", "Ünïcode 漢字 🐼\n\ttab", " lead", "", "\x00"])
def test_every_text_comes_back(tokenizer: GPT2BPETokenizer, text: str) -> None:
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_the_end_token_is_last_and_never_made_from_text(tokenizer: GPT2BPETokenizer) -> None:
    assert tokenizer.eod == tokenizer.eos == tokenizer.vocab_size - 1
    assert tokenizer.inv_vocab[tokenizer.eod] == END_OF_DOCUMENT
    assert tokenizer.eod not in tokenizer.tokenize(f"a{END_OF_DOCUMENT}b")


def test_megatron_can_describe_it(tokenizer: GPT2BPETokenizer) -> None:
    assert json.dumps(tokenizer.unique_identifiers) == '{"class": "GPT2BPETokenizer"}'


def test_training_gives_the_same_files_in_another_process(
    prepared: Prepared, tmp_path: Path
) -> None:
    module = "megatron_bamboo.data.train_tokenizer"
    size = str(len(json.loads(prepared.vocab_file.read_text(encoding="utf-8"))))
    command = [sys.executable, "-m", module, "--input", str(prepared.corpus)]
    subprocess.run([*command, "--vocab-size", size, "--output-dir", str(tmp_path)], check=True)
    for file in (prepared.vocab_file, prepared.merge_file):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("size", ["256", "0"])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(
    prepared: Prepared, tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", str(prepared.corpus), "--output-dir", str(tmp_path)]
    assert train_tokenizer.main([*arguments, "--vocab-size", size]) == 2
    assert "at least 257" in capsys.readouterr().err


def test_bad_files_are_named(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--vocab-file: no such file"):
        GPT2BPETokenizer(tmp_path / "none.json", prepared.merge_file)
    broken = tmp_path / "vocab.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="cannot read"):
        GPT2BPETokenizer(broken, prepared.merge_file)
    vocab = json.loads(prepared.vocab_file.read_text(encoding="utf-8"))
    del vocab[END_OF_DOCUMENT]
    broken.write_text(json.dumps(vocab), encoding="utf-8")
    with pytest.raises(UserError, match="ends each document"):
        GPT2BPETokenizer(broken, prepared.merge_file)


def test_padded_vocabulary() -> None:
    assert padded_vocab_size(50257) == 50304  # Megatron's well-known size
    assert padded_vocab_size(128) == 128
    assert padded_vocab_size(129, 64, 2) == 256
