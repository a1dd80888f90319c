"""Leases are kept by those who can hear, and judged only while someone listens."""

import pytest

from megatron_bamboo.agent.leases import FIRST_WORD, Leases, beat_seconds

LOOK = 0.25


class Case:
    """Leases of 5 s under a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leases = Leases(5.0, lambda: self.now)
        self.leases.grant("node0")

    def wait(self, seconds: float) -> None:
        """As a coordinator does: looking often."""
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            self.leases.silent()

    def renew(self, word: str) -> str:
        answer = self.leases.renew("node0", word)
        assert answer is not None
        return answer


@pytest.fixture
def case() -> Case:
    return Case()


def test_who_says_nothing_is_silent_after_the_lease(case: Case) -> None:
    case.wait(5.0)
    assert case.leases.silent() == {}
    case.wait(LOOK)
    assert case.leases.silent() == {"node0": 5.25}


def test_who_repeats_the_last_word_is_not(case: Case) -> None:
    word = FIRST_WORD
    for _ in range(10):
        case.wait(4.0)
        word = case.renew(word)
    assert case.leases.silent() == {}


def test_who_cannot_hear_is_silent(case: Case) -> None:
    word = case.renew(FIRST_WORD)
    for _ in range(4):
        case.wait(beat_seconds(5.0))
        assert case.renew(FIRST_WORD) == word
    case.wait(2 * LOOK)
    assert "node0" in case.leases.silent()


def test_who_hears_again_is_there_again(case: Case) -> None:
    word = case.renew(FIRST_WORD)
    case.wait(4.0)
    assert case.renew(FIRST_WORD) == word
    assert case.renew(word) != word
    case.wait(4.0)
    assert case.leases.silent() == {}


def test_a_pause_of_the_judge_is_nobodys_silence(case: Case) -> None:
    case.now += 60.0
    assert case.leases.silent() == {}
    case.wait(4.0)
    assert case.leases.silent() == {}


def test_who_is_lost_has_no_lease(case: Case) -> None:
    case.leases.end("node0")
    case.wait(6.0)
    assert case.leases.silent() == {}
    assert case.leases.renew("node0", FIRST_WORD) is None
