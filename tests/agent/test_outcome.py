"""How a job ended, as a file that others read."""

from pathlib import Path

from megatron_bamboo.agent.outcome import OUTCOME_FILE, Outcome, Status


def test_an_outcome_comes_back_exactly(tmp_path: Path) -> None:
    assert Outcome.read(tmp_path) is None
    lost = (("node2", "its connection closed"), ("node0", "it hangs"))
    for outcome in (Outcome(Status.FINISHED), Outcome(Status.NO_HOLDER, "no holder", lost)):
        outcome.write(tmp_path)
        assert Outcome.read(tmp_path) == outcome
        assert Outcome.from_json(outcome.to_json()) == outcome
    assert [path.name for path in tmp_path.iterdir()] == [OUTCOME_FILE]
