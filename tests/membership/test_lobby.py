"""Who must leave when more come than there is room for."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.membership.lobby import Lobby


def test_the_oldest_leaves() -> None:
    lobby: Lobby[int] = Lobby(3)
    assert [lobby.enter(guest, "here") for guest in range(6)] == [None, None, None, 0, 1, 2]
    lobby.leave(4, "here")
    lobby.leave(0, "here")
    assert (len(lobby), lobby.enter(6, "here"), lobby.enter(7, "here")) == (2, None, 3)


def test_a_flood_from_one_address_keeps_nobody_out_who_comes_from_another() -> None:
    lobby: Lobby[str] = Lobby(4)
    assert lobby.enter("friend", "there") is None
    out = [lobby.enter(f"stranger{n}", "here") for n in range(100)]
    assert out[3:] == [f"stranger{n}" for n in range(97)]
    lobby.leave("friend", "there")
    assert len(lobby) == 3


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abc"), st.booleans()), max_size=80))
def test_there_are_never_more_than_the_room(steps: list[tuple[int, str, bool]]) -> None:
    lobby: Lobby[tuple[int, int]] = Lobby(5)
    inside: dict[tuple[int, int], str] = {}
    for number, (guest, address, enters) in enumerate(steps):
        if enters:
            one = (guest, number)
            inside[one] = address
            if (out := lobby.enter(one, address)) is not None:
                crowd = max(list(inside.values()).count(a) for a in inside.values())
                assert list(inside.values()).count(inside[out]) == crowd
                del inside[out]
        elif inside:
            one, address = list(inside.items())[guest % len(inside)]
            del inside[one]
            lobby.leave(one, address)
        assert len(lobby) == len(inside) <= 5
