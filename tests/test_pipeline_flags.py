"""What pipelines follow from the flags that cut them apart and share the batch out."""

import json
from pathlib import Path

import pytest

from megatron_bamboo.config import Options, check_options, parse_options, read_costs, without_nodes
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.layers import Unit, UnitCosts
from megatron_bamboo.schedule.costs import Costs

FLAGS = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --num-layers 5"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("text.bin", "text.idx", "vocab.json", "merges.txt"):
        (tmp_path / name).touch()
    return tmp_path


def read(folder: Path, flags: str) -> Options:
    files = f"--data-path {folder}/text --vocab-file {folder}/vocab.json"
    return parse_options(f"{FLAGS} {files} --merge-file {folder}/merges.txt {flags}".split())


def arranged(folder: Path, flags: str, num_nodes: int) -> Arrangement:
    return check_options(read(folder, flags), num_nodes).arrangement


def cuts(arrangement: Arrangement) -> list[tuple[int, ...]]:
    """By pipeline the units of each stage."""
    return [tuple(past - first for first, past in p.spans) for p in arrangement.pipelines]


@pytest.mark.parametrize(
    ("flags", "units", "microbatches"),
    [
        # Layers as equal as can be, microbatches so that the slowest pipeline is fastest.
        ("3,2 --global-batch-size 16", [(3, 2, 2), (4, 3)], (5, 3)),
        ("2,3 --global-batch-size 16", [(4, 3), (3, 2, 2)], (3, 5)),
        ("1+3+1,2+3 --global-batch-size 16", [(2, 3, 2), (3, 4)], (4, 4)),
        ("3,2 --bamboo-microbatches 2,6", [(3, 2, 2), (4, 3)], (2, 6)),
        ("3,2", [(3, 2, 2), (4, 3)], (1, 1)),
        ("5,5,2 --global-batch-size 6", [(2, 1, 1, 1, 2)] * 2 + [(4, 3)], (1, 1, 1)),
    ],
)
def test_each_pipeline_has_a_cut_and_work_of_its_own(
    folder: Path, flags: str, units: list[tuple[int, ...]], microbatches: tuple[int, ...]
) -> None:
    found = arranged(folder, f"--bamboo-pipelines {flags}", sum(map(len, units)))
    assert (cuts(found), found.microbatches) == (units, microbatches)


def test_pipelines_that_are_cut_alike_may_have_unequal_work(folder: Path) -> None:
    flags = "--pipeline-model-parallel-size 5 --bamboo-microbatches 3,1"
    layout = check_options(read(folder, flags), 10)
    assert layout.arrangement.microbatches == (3, 1) and layout.arrangement.is_cut_alike
    assert layout.global_batch_size == 8


def test_each_pipeline_has_a_shard_of_the_optimizer(folder: Path) -> None:
    options = read(folder, "--bamboo-pipelines 3,2 --use-distributed-optimizer")
    assert check_options(options, 5).num_shards == 2


@pytest.mark.parametrize(
    ("flags", "num_nodes", "message"),
    [
        ("--bamboo-pipelines 3,2", 6, "--bamboo-pipelines 3,2 needs 5 nodes, not 6"),
        ("--bamboo-pipelines 3;2", 5, "give the number of stages of each pipeline, like 3,2"),
        ("--bamboo-pipelines 6,2", 8, "a pipeline of 5 layers can have 1 to 5 stages"),
        ("--bamboo-pipelines 0,2", 2, "a pipeline of 5 layers can have 1 to 5 stages"),
        ("--bamboo-pipelines 2+2,3", 5, "the stages 2+2 do not have 5 layers"),
        ("--bamboo-pipelines 5+0,3", 5, "the stages 5+0 do not have 5 layers, one at least each"),
        ("--bamboo-pipelines 4,1", 5, "a pipeline of one stage cannot train beside longer ones"),
        ("--bamboo-pipelines 1,1", 2, "a pipeline of one stage has no neighbour"),
        (
            "--bamboo-pipelines 3,2 --pipeline-model-parallel-size 3",
            5,
            "says how many stages there are: leave out --pipeline-model-parallel-size",
        ),
        (
            "--bamboo-pipelines 3,2 --num-layers-per-virtual-pipeline-stage 1",
            5,
            "pipelines that are cut apart are not interleaved",
        ),
        ("--bamboo-pipelines 3,2 --global-batch-size 7", 5, "does not divide into microbatches"),
        ("--bamboo-pipelines 3,2 --global-batch-size 2", 5, "one or more for each of 2 pipelines"),
        ("--bamboo-pipelines 3,2 --bamboo-microbatches 3", 5, "give 2 numbers, 1 or more for each"),
        ("--bamboo-pipelines 3,2 --bamboo-microbatches 3,0", 5, "give 2 numbers, 1 or more"),
        ("--bamboo-pipelines 3,2 --bamboo-microbatches a,b", 5, "give 2 numbers, 1 or more"),
        (
            "--bamboo-pipelines 3,2 --bamboo-microbatches 3,2 --global-batch-size 8",
            5,
            "5 microbatches of 2 are 10 samples, not --global-batch-size 8",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    folder: Path, flags: str, num_nodes: int, message: str
) -> None:
    with pytest.raises(UserError) as refused:
        arranged(folder, flags, num_nodes)
    (line,) = str(refused.value).splitlines()
    assert message in line


def profile(folder: Path, seconds: list[float], stages: int = 1) -> str:
    """Costs by unit, backwards twice as long as forwards, beside those of equal stages."""
    units = UnitCosts(tuple(Unit(f"unit{n}", s, 2 * s) for n, s in enumerate(seconds)))
    chunks = Costs((1.0,) * stages, (2.0,) * stages)
    path = folder / "costs.json"
    path.write_text(json.dumps(json.loads(chunks.to_json()) | units.to_json()))
    return f"--bamboo-costs {path}"


def test_a_profile_decides_who_gets_how_many_microbatches(folder: Path) -> None:
    """The head takes as long as four layers, and each pipeline has a stage with it."""
    flags = "--bamboo-pipelines 3,2 --global-batch-size 16"
    assert arranged(folder, flags, 5).microbatches == (5, 3)
    costs = profile(folder, [0.1, *[1.0] * 5, 4.0])
    assert arranged(folder, f"{flags} {costs}", 5).microbatches == (4, 4)


def test_stages_take_what_their_units_do(folder: Path) -> None:
    flags = f"--bamboo-pipelines 3,2 {profile(folder, [0.5, 1, 2, 3, 4, 5, 6.0])}"
    options = read(folder, flags)
    first, second = read_costs(options.bamboo, check_options(options, 5).arrangement)
    assert first.forward == ((3.5,), (7.0,), (11.0,))
    assert second.backward == ((13.0,), (30.0,))


@pytest.mark.parametrize(
    ("seconds", "message"),
    [([1.0] * 6, "it has costs of 6 units, the model has 7"), ([1.0] * 9, "costs of 9 units")],
)
def test_costs_of_another_model_are_refused(
    folder: Path, seconds: list[float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        arranged(folder, f"--bamboo-pipelines 3,2 {profile(folder, seconds)}", 5)


def test_costs_of_stages_are_those_of_one_cut(folder: Path) -> None:
    path = folder / "costs.json"
    path.write_text(Costs((1.0, 2.0, 3.0), 2.0).to_json())
    with pytest.raises(UserError, match="forward has costs of 3 stages, not of 2"):
        arranged(folder, f"--bamboo-pipelines 3,2 --bamboo-costs {path}", 5)


@pytest.mark.parametrize(
    ("flags", "num_nodes"),
    [
        ("--bamboo-pipelines 3,2 --bamboo-microbatches 5,3", 5),
        ("--pipeline-model-parallel-size 5 --bamboo-microbatches 3,1", 5),
    ],
)
def test_what_needs_no_nodes_needs_no_microbatches(
    folder: Path, flags: str, num_nodes: int
) -> None:
    alone, needed = without_nodes(read(folder, flags))
    assert (needed, check_options(alone, needed).arrangement.num_nodes) == (num_nodes, num_nodes)
