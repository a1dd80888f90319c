"""What a training script does in each phase, short of training itself."""

import json
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_bamboo.agent.job import JOB_FILE, JobShape
from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.data import train_tokenizer
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.training import Script, WorkerEnvironment, run_phase
from pretrain_gpt_bamboo import train_valid_test_datasets_provider


def never_called(*_arguments: object, **_more: object) -> NoReturn:
    raise AssertionError("no model is built and no step is run before the workers")


SCRIPT = Script(train_valid_test_datasets_provider, never_called, never_called)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": "two foxes. " * 20}) + "\n" for _ in range(20)))
    files = ["--input", str(corpus), "--vocab-size", "260", "--output-dir", str(folder)]
    assert train_tokenizer.main(files) == 0
    output = ["--output-prefix", str(folder / "x"), "--append-eod"]
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    assert bamboo(["preprocess", "--input", str(corpus), *output, *files]) == 0
    return folder


def flags(text: Path, *more: str) -> list[str]:
    shape = "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
    shape += " --max-position-embeddings 8 --pipeline-model-parallel-size 2 --lr 1e-3"
    shape += " --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --split 100,0,0"
    files = f"--data-path {text}/x_text_document --vocab-file {text}/vocab.json"
    return [*shape.split(), *files.split(), "--merge-file", f"{text}/merges.txt", *more]


@pytest.fixture
def job_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prepare phase of a job of 4 nodes."""
    monkeypatch.setattr("sys.argv", ["/some/where/my_pretrain.py"])
    monkeypatch.setenv("BAMBOO_PHASE", "prepare")
    monkeypatch.setenv("BAMBOO_NUM_NODES", "4")
    monkeypatch.setenv("BAMBOO_WORKERS_PER_NODE", "1")
    monkeypatch.setenv("BAMBOO_JOB_DIR", str(tmp_path))
    return tmp_path


def test_preparing_leaves_the_jobs_shape_and_the_indices(text: Path, job_dir: Path) -> None:
    cache = job_dir / "cache"
    more = ("--bamboo-redundancy", "eager", "--data-cache-path", str(cache))
    assert run_phase(SCRIPT, flags(text, *more)) == 0
    shape = JobShape.read(job_dir)
    assert shape == JobShape(
        equal_pipelines(2, 2, 4, layers_per_chunk=2),
        redundancy="eager",
        train_iters=3,
        global_batch_size=8,
        costs=(EQUAL_COSTS.to_json(),) * 2,
        unit_works=(0, 1, 1, 1, 1, 0),
        inputs=shape.inputs,
        indices=shape.indices,
        # 16 bytes a parameter; a vocabulary of 384, and 8 positions.
        unit_bytes=(16 * 16 * 392, *[16 * 12 * 16**2] * 4, 16 * 16 * 384),
    )
    assert shape.indices is not None
    assert list(Path(shape.indices).rglob("*GPTDataset-train-*.npy"))
    named = [(name, Path(path).name) for name, path in shape.inputs]
    assert named[:4] == [
        ("--data-path", "x_text_document.idx"),
        ("--data-path", "x_text_document.bin"),
        ("--vocab-file", "vocab.json"),
        ("--merge-file", "merges.txt"),
    ]
    # torch has modules that are said to be of files which are nowhere.
    assert all(Path(path).is_file() for _, path in shape.inputs)
    # This test has its providers from there; what is installed is not the script's own.
    assert ("module", "pretrain_gpt_bamboo.py") in named
    assert not {"pytest", "numpy", "training.py"} & {Path(p).stem for _, p in shape.inputs}


def test_the_indices_alone_are_built_where_a_node_does_not_see_them(
    text: Path, job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = job_dir / "cache"
    monkeypatch.setenv("BAMBOO_PHASE", "index")
    assert run_phase(SCRIPT, flags(text, "--data-cache-path", str(cache))) == 0
    assert list(cache.rglob("*GPTDataset-train-*.npy"))
    assert not (job_dir / JOB_FILE).exists()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--num-layers", "3"), "3 layers cannot be cut into 2 equal stages"),
        (("--num-experts", "2"), "--num-experts: mixtures of experts is not supported yet"),
        (("--what",), "there is no flag --what"),
        (("--split", "0,1,0"), "--split must be up to three numbers"),
        (("--seq-length", "9"), "--seq-length 9 needs --max-position-embeddings"),
    ],
)
def test_bad_input_is_one_line_of_the_script_and_no_job(
    text: Path,
    job_dir: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    line: str,
) -> None:
    assert run_phase(SCRIPT, flags(text, *more)) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"my_pretrain.py: {line}") and output.err.count("\n") == 1
    assert output.out == ""
    assert not (job_dir / JOB_FILE).exists()


def test_a_script_started_alone_says_how_to_start_it(
    text: Path, job_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BAMBOO_PHASE")
    assert run_phase(SCRIPT, flags(text)) == 2
    line = "my_pretrain.py: start this script with: bamboo run --nodes N SCRIPT FLAGS\n"
    assert capsys.readouterr().err == line


def test_a_worker_reads_what_its_agent_set(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = Secret.of("no secret of any job, only a long text").node("node3", "77")
    for name, value in {
        "NODE": "node3",
        "TENSOR_RANK": "1",
        "WORKERS_PER_NODE": "2",
        "JOB_DIR": "/job",
        "STORE": "127.0.0.1:99",
        "STORE_DEADLINE": "12.5",
        "INJECT": "iter7:2.0B3",
        "NODE_KEY": identity.to_text(),
    }.items():
        monkeypatch.setenv(f"BAMBOO_{name}", value)
    address = "127.0.0.1:99"
    found = WorkerEnvironment.read()
    assert found == WorkerEnvironment(identity, 1, 2, Path("/job"), address, 12.5, "iter7:2.0B3")
    assert found.worker == "node3:1"
