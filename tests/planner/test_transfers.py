"""Every unit that is lacking is sent once, by a holder, and nobody sends longer than it must."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bamboo.planner.transfers import Links, TransferList, UnitTransfer, plan_transfers

NODES = tuple(f"node{i}" for i in range(5))
UNITS = range(5)
Held = dict[str, frozenset[int]]

holdings = st.fixed_dictionaries({node: st.frozensets(st.sampled_from(UNITS)) for node in NODES})
equal_sizes = st.integers(1, 9).map(lambda size: dict.fromkeys(UNITS, size))
sizes = st.fixed_dictionaries({unit: st.integers(1, 9) for unit in UNITS})
speeds = st.fixed_dictionaries({node: st.integers(1, 3) for node in NODES})


def lacking(needed: Held, held: Held) -> list[tuple[int, str]]:
    return sorted((unit, node) for node in needed for unit in needed[node] - held[node])


def shortest(needed: Held, held: Held, links: Links) -> float:
    """The time of the busiest sender, over all choices of sources."""
    sent = [unit for unit, _ in lacking(needed, held)]
    choices = [[node for node in NODES if unit in held[node]] for unit in sent]
    best = float("inf")
    for sources in product(*(choice for choice in choices if choice)):
        loads = dict.fromkeys(NODES, 0)
        for unit, source in zip(
            (u for u, c in zip(sent, choices, strict=True) if c), sources, strict=True
        ):
            loads[source] += links.unit_bytes[unit]
        best = min(best, max(links.time(node, load) for node, load in loads.items()))
    return best


def few(needed: Held, held: Held) -> Held:
    """At most seven transfers, so that all choices can be tried."""
    kept = lacking(needed, held)[:7]
    return {node: frozenset(unit for unit, n in kept if n == node) for node in NODES}


def busiest(transfers: TransferList, links: Links) -> float:
    slowest = transfers.busiest(links)
    return 0 if slowest is None else slowest[1]


@given(holdings, holdings, sizes, speeds)
def test_each_unit_that_is_lacking_comes_once_from_a_live_holder(
    needed: Held, held: Held, unit_bytes: dict[int, int], speed: dict[str, float]
) -> None:
    moves = plan_transfers(needed, held, Links(unit_bytes, speed))
    known = set().union(*held.values())
    expected = lacking(needed, held)
    assert [(t.unit, t.target) for t in moves.transfers] == [e for e in expected if e[0] in known]
    assert all(t.unit in held[t.source] for t in moves.transfers)
    assert set(moves.lost_units) == {unit for unit, _ in expected} - known


@given(holdings, holdings, equal_sizes, speeds)
@settings(max_examples=60)
def test_units_of_one_size_are_sent_as_early_as_any_choice_allows(
    needed: Held, held: Held, unit_bytes: dict[int, int], speed: dict[str, float]
) -> None:
    links, wanted = Links(unit_bytes, speed), few(needed, held)
    assert busiest(plan_transfers(wanted, held, links), links) == shortest(wanted, held, links)


@given(holdings, holdings, sizes, speeds)
@settings(max_examples=60)
def test_units_of_several_sizes_are_late_by_the_largest_at_most(
    needed: Held, held: Held, unit_bytes: dict[int, int], speed: dict[str, float]
) -> None:
    links, wanted = Links(unit_bytes, speed), few(needed, held)
    found = busiest(plan_transfers(wanted, held, links), links)
    assert found <= shortest(wanted, held, links) + max(unit_bytes.values())


def test_a_holder_that_must_send_much_leaves_to_others_what_they_have() -> None:
    """Only node0 has unit 2, and node1 passes unit 1 on to node2 to take unit 0 from node0."""
    held = {"node0": {0, 2}, "node1": {0, 1}, "node2": {1}}
    links = Links(dict.fromkeys(range(3), 100))
    moves = plan_transfers({"node9": {0, 1, 2}}, held, links)
    assert moves.transfers == (
        UnitTransfer(0, "node1", "node9"),
        UnitTransfer(1, "node2", "node9"),
        UnitTransfer(2, "node0", "node9"),
    )
    assert moves.total_bytes(links) == 300
    assert moves.busiest(links) == ("node0", 100)


def test_a_slow_link_sends_less() -> None:
    held = {"node0": set(UNITS), "node1": set(UNITS)}
    links = Links(dict.fromkeys(UNITS, 100), {"node0": 50, "node1": 200})
    moves = plan_transfers({"node2": set(UNITS)}, held, links)
    assert [transfer.source for transfer in moves.transfers].count("node0") == 1
    assert moves.busiest(links) == ("node0", 2)


def test_units_without_a_holder_are_named_and_the_others_move() -> None:
    links = Links(dict.fromkeys(range(3), 1))
    moves = plan_transfers({"node1": {0, 1, 2}}, {"node0": {1}}, links)
    assert moves == TransferList((UnitTransfer(1, "node0", "node1"),), (0, 2))
    assert plan_transfers({"node0": {1}}, {"node0": {1}}, links).busiest(links) is None
