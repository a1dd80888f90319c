"""``bamboo memory`` says what a run needs, in a table or for programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.schedule.footprint import Category

SCRIPT = Path(__file__).parents[2] / "pretrain_gpt_bamboo.py"
# Nobody has the memory to build it.
HUGE = (
    *("--num-layers", "96", "--hidden-size", "12288", "--num-attention-heads", "96"),
    *("--seq-length", "2048", "--max-position-embeddings", "2048", "--micro-batch-size", "1"),
    *("--global-batch-size", "16", "--train-iters", "10", "--lr", "1e-4", "--bf16"),
    *("--pipeline-model-parallel-size", "16", "--bamboo-redundancy", "lazy"),
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    for name in ("text.bin", "text.idx"):
        (tmp_path / name).touch()
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    names = ("--vocab-file", str(tmp_path / "vocab.json"))
    merges = ("--merge-file", str(tmp_path / "merges.txt"))
    return (*names, *merges, "--data-path", str(tmp_path / "text"))


def test_it_needs_no_memory_to_say_how_much_is_needed(files: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "megatron_bamboo", "memory", "--json", "--nodes", "16"]
    done = subprocess.run(
        [*command, str(SCRIPT), *HUGE, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    nodes = json.loads(done.stdout)
    layer = 12 * 12288**2 + 13 * 12288
    middle = nodes[7]["at_peak"]
    assert middle["parameters"] == 2 * 6 * layer
    assert middle["gradients"] == 8 * 6 * layer
    assert middle["optimizer state"] == pytest.approx(12 * 6 * layer, rel=1e-6)
    assert middle["replica"] == pytest.approx(22 * 6 * layer, rel=1e-6)
    assert [node["replica"] for node in nodes] == [*range(1, 16), 0]
    assert all(node["largest"].keys() == set(Category) for node in nodes)


def test_unequal_pipelines_need_what_each_of_their_stages_does(files: tuple[str, ...]) -> None:
    """Of two that are alike only the first is told of."""
    small = (
        *("--num-layers", "6", "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1"),
        *("--train-iters", "10", "--lr", "1e-4", "--bamboo-pipelines", "1+2+3,3+3,1+2+3"),
        *("--bamboo-microbatches", "2,5,2"),
    )
    command = [sys.executable, "-m", "megatron_bamboo", "memory", "--nodes", "8", str(SCRIPT)]
    done = subprocess.run([*command, *small, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = [line.split("|")[1:4] for line in done.stdout.splitlines() if line.startswith("|")]
    rows = [tuple(word.strip() for word in words) for words in table]
    assert rows[0] == ("pipeline", "stage", "replica of")
    places = [("0", "0", "1"), ("0", "1", "2"), ("0", "2", "0"), ("1", "0", "1"), ("1", "1", "0")]
    assert rows[2:7] == places


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "0", str(SCRIPT)), "--nodes must be at least 1, not 0"),
        (("--nodes", "2", "nowhere.py"), "there is no script nowhere.py"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert bamboo(["memory", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
