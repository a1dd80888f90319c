"""How a job ended, as a file that others read."""

import errno
from pathlib import Path

import pytest

from megatron_bamboo.agent.outcome import OUTCOME_FILE, Outcome, Status


def test_an_outcome_comes_back_exactly(tmp_path: Path) -> None:
    assert Outcome.read(tmp_path) is None
    lost = (("node2", "its connection closed"), ("node0", "it hangs"))
    for outcome in (Outcome(Status.FINISHED), Outcome(Status.NO_HOLDER, "no holder", lost)):
        outcome.write(tmp_path)
        assert Outcome.read(tmp_path) == outcome
        assert Outcome.from_json(outcome.to_json()) == outcome
    assert [path.name for path in tmp_path.iterdir()] == [OUTCOME_FILE]


@pytest.mark.parametrize(("times", "is_read"), [(1, True), (4, True), (5, False)])
def test_a_file_that_is_refused_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, is_read: bool
) -> None:
    outcome = Outcome(Status.STOPPED, "its user wanted it")
    outcome.write(tmp_path)
    refusals = [OSError(errno.ESTALE, "Stale file handle")] * times
    read = Path.read_text

    def refuse(path: Path) -> str:
        if refusals:
            raise refusals.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr("megatron_bamboo.agent.outcome.AGAIN_SECONDS", 0.0)
    if is_read:
        assert Outcome.read(tmp_path) == outcome
    else:
        with pytest.raises(OSError, match="Stale"):
            Outcome.read(tmp_path)


def test_a_file_that_may_not_be_read_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refuse(path: Path) -> str:
        tries.append(path)
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PermissionError):
        Outcome.read(tmp_path)
    assert len(tries) == 1
