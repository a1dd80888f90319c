"""Bad input to ``bamboo run`` gets one line and exit status 2, before any worker starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from in_ci import in_ci

from megatron_bamboo.agent.job_folder import LOCK_FILE

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parent.parent
NODES = 8
GOOD = (
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "1", "--global-batch-size", "16", "--train-iters", "5", "--lr", "1e-3"),
    *("--pipeline-model-parallel-size", "4"),
)
# By what is wrong: nodes, flags added, and the line that is expected.
CASES = {
    "layers that cannot be cut": (NODES, "--num-layers 6", "6 layers cannot be cut into 4 equal"),
    "a missing data file": (NODES, "--data-path /nowhere/x", "there is no file /nowhere/x.bin;"),
    "an unknown flag": (NODES, "--num-layer 8", "no flag --num-layer; did you mean --num-layers?"),
    "more stages than layers": (NODES, "--num-layers 2", "4 stages cannot share 2 layers"),
    "a batch that does not divide": (NODES, "--global-batch-size 15", "make it a multiple of 2"),
    "nodes that do not divide": (6, "", "6 nodes do not make whole pipelines of 4 stages"),
    "an unsupported flag": (NODES, "--async-save", "--async-save: "),
    "mirrors that a link cannot carry": (
        NODES,
        "--transformer-impl emulated --bamboo-emulated-forward-ms 4 --bamboo-emulated-backward-ms "
        "8 --bamboo-emulated-bandwidth 1 --bamboo-mirror-gradients 2",
        "--bamboo-mirror-gradients 2: at 1 MB/s a mirror of stage 0 has ",
    ),
    "an unusable data file": (NODES, "", "text.idx is not an index that Megatron wrote"),
}


IN_CI = (
    "layers that cannot be cut",
    "an unknown flag",
    "nodes that do not divide",
    "an unusable data file",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags of a tokenizer that is one, and of data that is none."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("text.bin", "text.idx"):
        (folder / name).write_text("nothing of use")
    (folder / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = ("--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt")
    return ("--data-path", f"{folder}/text", *tokenizer)


@pytest.mark.parametrize("case", in_ci(CASES, *IN_CI))
def test_one_line_status_two_and_no_worker(
    tmp_path: Path, files: tuple[str, ...], case: str
) -> None:
    nodes, flags, expected = CASES[case]
    command = [sys.executable, "-m", "megatron_bamboo", "run", "--nodes", str(nodes)]
    command += ["--job-dir", str(tmp_path), str(ROOT / "pretrain_gpt_bamboo.py"), *GOOD]
    command += [*files, *flags.split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("pretrain_gpt_bamboo.py: ")
    assert expected in line
    assert {path.name for path in tmp_path.iterdir()} <= {LOCK_FILE}, "a job was begun"
