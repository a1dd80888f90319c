import json
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from prepared_data import Prepared

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.data.tokenizer import GPT2BPETokenizer


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_each_document_is_there_with_its_end(prepared: Prepared) -> None:
    tokenizer = GPT2BPETokenizer(prepared.vocab_file, prepared.merge_file)
    dataset = IndexedDataset(prepared.data_path)
    lines = prepared.corpus.read_text(encoding="utf-8").splitlines()
    assert len(dataset) == len(dataset.document_indices) - 1 == len(lines)
    for tokens, line in zip(dataset, lines, strict=True):
        assert tokens[-1] == tokenizer.eod
        assert tokenizer.detokenize(tokens[:-1].tolist()) == json.loads(line)["text"]


@pytest.mark.multiprocess
def test_more_workers_write_the_same_bytes(prepared: Prepared) -> None:
    assert prepared.preprocess("--append-eod", "--workers", "2", prefix="two") == 0
    for suffix in (".bin", ".idx"):
        one, two = (
            prepared.corpus.with_name(f"{name}_text_document{suffix}") for name in ("my", "two")
        )
        assert one.read_bytes() == two.read_bytes()


def test_several_keys_sentences_and_empty_texts(prepared: Prepared, tmp_path: Path) -> None:
    corpus = write_lines(
        tmp_path / "in.jsonl",
        json.dumps({"title": "One", "text": ["First sentence.", "", "Second."]}),
        "",
        json.dumps({"title": "", "text": "Plain."}),
    )
    assert prepared.preprocess("--json-keys", "title", "text", corpus=corpus) == 0
    titles = IndexedDataset(str(tmp_path / "other_title_document"))
    texts = IndexedDataset(str(tmp_path / "other_text_document"))
    assert (len(titles), list(titles.document_indices)) == (1, [0, 1, 1])
    assert (len(texts), list(texts.document_indices)) == (3, [0, 2, 3])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"body": "x"}', "line 2: no text under 'text'; name another with --json-keys"),
        ('{"text": 3}', "line 2: no text under 'text'"),
    ],
)
def test_a_bad_line_is_named_and_leaves_no_file(
    prepared: Prepared, tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_lines(tmp_path / "in.jsonl", '{"text": "good"}', line)
    assert prepared.preprocess(corpus=corpus) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.multiprocess
def test_a_bad_line_is_named_by_a_worker_too(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_lines(tmp_path / "in.jsonl", '{"text": "good"}', "bad")
    assert prepared.preprocess("--workers", "2", corpus=corpus) == 2
    assert "line 2: not JSON" in capsys.readouterr().err


def test_unusable_input_is_one_line(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write_lines(tmp_path / "empty.jsonl")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text": "caf\xe9"}\n')
    cases = {
        "holds no text": prepared.preprocess(corpus=empty),
        "no such file": prepared.preprocess(corpus=tmp_path / "none.jsonl"),
        "not UTF-8": prepared.preprocess(corpus=latin),
        "--workers must be": prepared.preprocess("--workers", "0"),
    }
    assert set(cases.values()) == {2}
    lines = capsys.readouterr().err.splitlines()
    for message, line in zip(cases, (line for line in lines if "bamboo" in line), strict=True):
        assert message in line


def test_megatrons_flags_that_do_nothing_here_are_refused(prepared: Prepared) -> None:
    with pytest.raises(SystemExit) as raised:
        bamboo(["preprocess", "--input", str(prepared.corpus), "--partitions", "2"])
    assert raised.value.code == 2
