"""What `bamboo plan` shows, and what it answers to what cannot be."""

import json
from pathlib import Path

import pytest

from megatron_bamboo.cli import main
from megatron_bamboo.planner.report import run_lengths

LAYERS = {"units": [{"forward": 1, "backward": 2}] * 24}
SIZED = {
    "units": [{"forward": 1, "backward": 2, "state_bytes": 100, "activation_bytes": 2}] * 8,
    "message_bytes": 1,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "layers.json").write_text(json.dumps(LAYERS))
    (tmp_path / "sized.json").write_text(json.dumps(SIZED))
    return tmp_path


def plan(files: Path, name: str, flags: str) -> int:
    return main(["plan", "--layers", str(files / f"{name}.json"), *flags.split()])


def test_tables_for_people(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files, "layers", "--nodes 7 --microbatches 24") == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "7 nodes, 24 microbatches, fault tolerance 1: 3 pipelines, 288 s an iteration by "
        "simulation, 288 s by the formula\n3 arrangements simulated and ranked by that; by the "
        "formula this one has place 1\n"
    )
    rows = [line.split() for line in told.splitlines()]
    assert ["2", "12", "x2", "36", "324"] in rows  # a template
    assert "they make up any number of nodes from 4 to 7; those of up to 3 nodes would do" in told
    assert ["0", "to", "1", "2", "12", "x2", "7", "288", "288"] in rows
    assert ["2", "3", "8", "x3", "10", "288", "288"] in rows
    assert "memory" not in told


def test_json_for_programs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--nodes 11 --microbatches 32 --memory 750 --zones a=6,b=5 --json"
    assert plan(files, "sized", flags) == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(template["spans"]) for template in told["templates"]] == [5, 6]
    assert (told["fewest_nodes"], told["uncovered"], told["longest_needed"]) == (10, [], 6)
    assert [len(pipeline["nodes"]) for pipeline in told["pipelines"]] == [5, 6]
    assert sum(pipeline["microbatches"] for pipeline in told["pipelines"]) == 32
    assert all(max(pipeline["memory_bytes"]) <= 750 for pipeline in told["pipelines"])
    nodes = [node for pipeline in told["pipelines"] for node in pipeline["nodes"]]
    assert sorted(nodes) == sorted(f"node{number}" for number in range(11))
    # Five stages in a ring cannot take turns between two zones.
    assert len(told["shared_zones"]) == 1
    assert told["simulated_seconds"] >= told["formula_seconds"]


def test_places_by_zone(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files, "sized", "--nodes 4 --microbatches 8 --zones a=2,b=2") == 0
    *_, first, second, last = capsys.readouterr().out.splitlines()
    zone = {"node0": "a", "node1": "a", "node2": "b", "node3": "b"}
    for line in (first, second):
        nodes = line.split(": ")[1].split()
        assert {zone[node] for node in nodes} == {"a", "b"}
    assert last == "the loss of one zone leaves a holder of each unit in each pipeline"


@pytest.mark.parametrize("flags", ["", "--format json"])
def test_a_file_gets_what_would_be_printed(
    files: Path, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    flags = f"--nodes 7 --microbatches 24 {flags}"
    assert plan(files, "layers", flags) == 0
    printed = capsys.readouterr().out
    assert plan(files, "layers", f"{flags} --output {files / 'plan'}") == 0
    assert (files / "plan").read_text() == printed
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_picture(files: Path) -> None:
    flags = f"--nodes 7 --microbatches 24 --format png --output {files / 'plan.png'}"
    assert plan(files, "layers", flags) == 0
    assert (files / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_cut_that_is_not_proven_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many unequal units and little memory: more beginnings of cuts than are kept."""
    sizes = [{"state_bytes": 50 + 37 * n % 100, "activation_bytes": 1} for n in range(24)]
    units = [{"forward": 1, "backward": 1 + n % 5, **size} for n, size in enumerate(sizes)]
    (tmp_path / "many.json").write_text(json.dumps({"units": units}))
    flags = "--nodes 6 --microbatches 24 --min-stages 6 --fault-tolerance 0 --memory 1240"
    assert plan(tmp_path, "many", flags) == 0
    told = capsys.readouterr().out
    assert "\n     6*  " in told
    assert "* the best found that fits into memory; a faster cut may have been missed\n" in told


def test_few_words_for_many_stages() -> None:
    assert run_lengths(((0, 3), (3, 4), (4, 5), (5, 6), (6, 8))) == "3, 1 x3, 2"


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("layers", "--nodes 13 --microbatches 64 --min-stages 7", "13 nodes, 2 pipelines of at"),
        ("layers", "--nodes 0 --microbatches 64", "--nodes 0: it must be 1 or more"),
        ("layers", "--nodes 4 --microbatches 8 --format png", "--format png needs --output FILE"),
        ("layers", "--nodes 4 --microbatches 8 --memory 9", "do not say what the units take of"),
        ("sized", "--nodes 4 --microbatches 8 --memory 0", "give a number of bytes above 0"),
        ("sized", "--nodes 4 --microbatches 8 --memory 9", "no cut into 2 to 8 stages fits into"),
        ("sized", "--nodes 4 --microbatches 8 --zones a", "give each zone its number of nodes"),
        ("sized", "--nodes 4 --microbatches 8 --zones a=2,b=1", "these are 3 nodes, not 4"),
        ("missing", "--nodes 4 --microbatches 8", "No such file"),
        ("sized", "--nodes 4 --microbatches 8 --output no/where", "No such file"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, flags: str, message: str
) -> None:
    assert plan(files, name, flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bamboo plan: ") and message in line
