"""Where a main thread says that it is, and how long it may be there."""

import pytest

from megatron_bamboo.execution.errors import PeerLost
from megatron_bamboo.execution.whereabouts import Limits, Whereabouts
from megatron_bamboo.membership.place import LOOP, START, Place
from megatron_bamboo.membership.signs import SignPage
from megatron_bamboo.membership.waits import Waiting

FIRST, OTHER = 300.0, 900.0


@pytest.fixture
def page() -> SignPage:
    return SignPage.make("node1")


class Clock:
    """A clock that the test turns."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def where(page: SignPage, clock: Clock) -> Whereabouts:
    return Whereabouts(4, Limits(5.0, FIRST, OTHER), page, clock)


def shown(page: SignPage) -> tuple[Place, float]:
    signs = page.read()
    assert signs is not None
    return signs.place, signs.limit_seconds


def test_places_lie_in_each_other(where: Whereabouts, page: SignPage) -> None:
    assert shown(page) == (Place(4, START), OTHER)
    with where.at(5, LOOP):
        with where.at(5, "1.0RECV_F2", "node0"):
            assert shown(page) == (Place(5, "1.0RECV_F2", "node0"), OTHER)
        assert shown(page) == (Place(5, LOOP), OTHER)
    assert where.place == Place(4, START)


def test_the_first_of_a_kind_may_take_long_and_later_ones_what_it_took(
    where: Whereabouts, page: SignPage, clock: Clock
) -> None:
    with where.at(5, "1.0F2", kind="F"):
        assert shown(page)[1] == FIRST
        clock.seconds += 0.5
    with where.at(5, "1.0F3", kind="F"):
        assert (
            shown(page)[1] == 5.5
        )  # never less than the lease, and who does not run is found first
        clock.seconds += 3.0
    with where.at(5, "1.0F4", kind="F"):
        assert shown(page)[1] == 15.0
    with where.at(5, "1.0B2", kind="B"):
        assert shown(page)[1] == FIRST


def test_a_wait_may_last_what_it_usually_does_once_the_others_have_done_their_part(
    where: Whereabouts, page: SignPage, clock: Clock
) -> None:
    waiting = Waiting(("node0",))

    def limit(seconds: float) -> float:
        with where.at(5, "1.0RECV_F2", "node0", "RECV_F", waiting):
            signs = page.read()
            assert signs is not None and signs.waiting == waiting
            clock.seconds += seconds
            return signs.limit_seconds

    assert limit(2.0) == FIRST
    assert limit(100.0) == 10.0
    limit(3.0)  # a takeover prolongs one wait, and that does not count for all that follow
    assert limit(0.1) == 15.0
    for _ in range(9):
        limit(0.1)
    assert limit(400.0) == 5.5
    for _ in range(9):
        limit(400.0)
    assert limit(1.0) == FIRST  # those who wait for this worker have no more patience
    signs = page.read()
    assert signs is not None and signs.waiting is None


def test_an_error_is_where_it_was_raised_unless_another_is_its_cause(where: Whereabouts) -> None:
    with pytest.raises(PeerLost), where.at(5, LOOP), where.at(5, "1.0RECV_F2", "node0"):
        raise PeerLost(("node0",), "receive", None)
    assert where.place == Place(4, START)
    with pytest.raises(KeyError), where.at(5, LOOP), where.at(5, "1.0F2"):
        raise KeyError
    assert where.place == Place(5, "1.0F2")
