"""What `bamboo simulate` shows, and what it answers to what cannot be."""

import json
from pathlib import Path

import pytest

from megatron_bamboo.cli import main
from megatron_bamboo.recovery.names import PolicyName

UNIT = {"forward": 1, "backward": 2, "state_bytes": 1000, "activation_bytes": 2}
TRACE = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n300000,remove,b\n600000,add,e\n1800000,remove,d\n"
FLAGS = "--microbatches 8 --restore-seconds 20 --save-seconds 5 --save-interval 5"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "layers.json").write_text(json.dumps({"units": [UNIT] * 6}))
    bare = [{"forward": 1, "backward": 2}] * 6
    (tmp_path / "bare.json").write_text(json.dumps({"units": bare}))
    (tmp_path / "spot.csv").write_text(TRACE)
    (tmp_path / "bad.csv").write_text("0,add,a\n1,lose,a\n")
    (tmp_path / "empty.csv").write_text("0,add,a\n1,remove,a\n2000,add,b\n")
    return tmp_path


def simulate(files: Path, flags: str, trace: str = "spot.csv", layers: str = "layers.json") -> int:
    paths = ["--trace", str(files / trace), "--layers", str(files / layers)]
    return main(["simulate", *paths, *flags.split()])


GOLDEN = (Path(__file__).parent / "side_by_side.txt").read_text(encoding="utf-8")


def test_the_policies_side_by_side(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(files, FLAGS) == 0
    told = capsys.readouterr().out
    assert [line.rstrip() for line in told.splitlines()] == GOLDEN.splitlines()


def test_json_has_each_decision_with_its_reason(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(files, f"{FLAGS} --policy oobleck,auto --from 0.05 --hours 0.25 --json") == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["policies"]) == ["oobleck", "auto"]
    assert told["trace"]["nodes"] == [[0.0, 4], [120.0, 3], [420.0, 4]]
    assert told["trace"]["seconds"] == 900
    for name, outcome in told["policies"].items():
        assert sum(outcome["seconds"].values()) == pytest.approx(900), name
        assert outcome["samples"] == 8 * outcome["iterations"]
        assert all(decided["reason"] for decided in outcome["decisions"])
        assert outcome["pieces"][-1]["end"] == 900
    second = told["policies"]["auto"]["decisions"][2]
    assert (second["seconds"], second["action"], second["event"]) == (120, "take over", "lost b")
    assert second["numbers"]["pause_seconds"] == 1


def test_pictures_and_files(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = files / "times.png"
    assert simulate(files, f"{FLAGS} --format png --output {picture}") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines() == GOLDEN.splitlines()[:3]
    assert simulate(files, f"{FLAGS} --output {files / 'times.txt'}") == 0
    written = (files / "times.txt").read_text().splitlines()
    assert [line.rstrip() for line in written] == GOLDEN.splitlines()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--policy varuna", "--policy varuna: give some of auto, bamboo, oobleck, checkpoint"),
        ("--policy auto,auto", "--policy auto,auto: name each once"),
        ("--nodes 0", "--nodes 0: it must be 1 or more"),
        ("--nodes 1", "the model needs 2 nodes, and there are at most 1 in this part"),
        ("--microbatches 0", "--microbatches 0: it must be 1 or more"),
        ("--micro-batch-size 0", "--micro-batch-size 0: it must be 1 or more"),
        ("--fault-tolerance -1", "--fault-tolerance -1: it must be 0 or more"),
        ("--bandwidth 0", "--bandwidth is 0: it must be above 0"),
        ("--save-interval 0", "--save-interval is 0: it must be above 0"),
        ("--restore-seconds nan", "--restore-seconds is nan: it must be 0 or above"),
        ("--from 1", "spot.csv: the trace has 0.5 hours: none of it is in the rest from hour 1 on"),
        ("--from -1", "none of it is in the rest from hour -1 on"),
        ("--hours 0", "none of it is in the 0 hours from hour 0 on"),
        ("--memory 10", "fits into 10 bytes a worker"),
        ("--format png", "--format png needs --output FILE"),
        ("--output nowhere/at/all", "--output nowhere/at/all: "),
    ],
)
def test_what_cannot_be_is_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], flags: str, problem: str
) -> None:
    assert simulate(files, flags) == 2
    told = capsys.readouterr().err
    assert told.startswith("bamboo simulate: ") and problem in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("trace", "layers", "flags", "problem"),
    [
        ("none.csv", "layers.json", "", "--trace "),
        ("bad.csv", "layers.json", "", "bad.csv: line 2 is 1,lose,a: all rows are"),
        ("empty.csv", "layers.json", "--from 0.0003 --hours 0.0001", "there is no node in this"),
        ("spot.csv", "none.json", "", "--layers "),
        ("spot.csv", "bare.json", "", "do not say how many bytes of state the units have"),
    ],
)
def test_files_that_will_not_do_are_named(
    files: Path,
    capsys: pytest.CaptureFixture[str],
    trace: str,
    layers: str,
    flags: str,
    problem: str,
) -> None:
    assert simulate(files, flags, trace, layers) == 2
    told = capsys.readouterr().err
    assert problem in told and len(told.splitlines()) == 1


def test_the_names_of_all_policies_are_those_of_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert ",".join(PolicyName) in capsys.readouterr().out.replace("\n", "").replace(" ", "")
