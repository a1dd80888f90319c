"""What is proposed is simulated, and what cannot be is answered with the smallest change."""

import pytest

from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.infeasible import Infeasible, Request
from megatron_bamboo.planner.layers import Unit, UnitBytes, UnitCosts
from megatron_bamboo.planner.propose import Planner
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.simulate import simulate

EVEN = UnitCosts(tuple(Unit(f"layer{i}", 1, 2) for i in range(24)))
SIZED = UnitCosts(tuple(Unit(f"layer{i}", 1, 2, UnitBytes(100, 2)) for i in range(8)), 1)


def sizes(arrangement: Arrangement) -> list[int]:
    return [pipeline.num_stages for pipeline in arrangement.pipelines]


def test_of_known_arrangements_the_one_that_is_simulated_fastest_comes_first() -> None:
    found = Planner(EVEN).propose(Request(7, 1, 24))
    assert [sizes(one.arrangement) for one in found] == [[2, 2, 3], [3, 4], [2, 5]]
    assert [one.formula_seconds for one in found] == [288, 306, 309]
    assert found[0].arrangement.microbatches == (7, 7, 10)
    assert [one.formula_rank for one in found] == [1, 2, 3]
    assert [one.simulated_seconds for one in found] == [288, 306, 309]


def test_what_the_formula_thinks_fastest_need_not_be() -> None:
    """With unequal stages it is too low; with fewer microbatches than stages by any factor."""
    works = (5, 1, 1)
    costs = UnitCosts(tuple(Unit(f"layer{i}", work, 2 * work) for i, work in enumerate(works)))
    found = Planner(costs).propose(Request(8, 1, 5))
    told = [(p.arrangement.microbatches, p.formula_seconds, p.simulated_seconds) for p in found]
    assert told == [((2, 1, 1, 1), 27, 31), ((1, 2, 2), 12, 33), ((2, 2, 1), 27, 33)]
    # The last one is fast by the work of its slowest stages only.
    assert [one.formula_rank for one in found] == [2, 1, None]


def test_the_simulated_time_is_that_of_the_slowest_pipeline() -> None:
    best, *_ = Planner(EVEN).propose(Request(7, 1, 24))
    times = []
    for pipeline in best.arrangement.pipelines:
        units = [float(past - first) for first, past in pipeline.spans]
        costs = Costs(tuple(units), tuple(2 * number for number in units))
        schedule = one_f_one_b(pipeline.num_stages, pipeline.num_microbatches)
        times.append(simulate(schedule, costs).makespan)
    assert best.simulated_seconds == max(times)


def test_of_equally_fast_ones_the_one_that_moves_least_comes_first() -> None:
    works = (2, 1, 2, 5, 1, 5, 3)
    units = UnitCosts(tuple(Unit(f"layer{i}", work, 2 * work) for i, work in enumerate(works)))
    request = Request(6, 1, 5)
    plain = Planner(units).propose(request)
    best = [one for one in plain if one.simulated_seconds == plain[0].simulated_seconds]
    assert len(best) > 1
    last = best[-1].arrangement
    moved = Planner(units).propose(request, moved=lambda arrangement: float(arrangement != last))
    assert (moved[0].arrangement, moved[0].moved) == (last, 0)


@pytest.mark.parametrize(
    ("request_", "least", "message"),
    [
        (
            Request(13, 1, 64),
            7,
            "13 nodes, 2 pipelines of at least 7 need 14: add 1 node or use --fault-tolerance 0",
        ),
        (Request(3, 1, 24), 2, "3 nodes, 2 pipelines of at least 2 need 4: add 1 node or use"),
        (Request(1, 0, 24), 2, "1 node, 1 pipeline of at least 2 need 2: add 1 node"),
        (
            Request(8, 3, 3),
            2,
            "3 microbatches for 4 pipelines, each of which needs one: use --microbatches 4 or "
            "--fault-tolerance 2",
        ),
        (
            Request(50, 0, 2),
            2,
            "50 nodes cannot be 1 to 2 pipelines of 2 to 24 nodes each: leave 2 nodes out or "
            "use --microbatches 3",
        ),
    ],
)
def test_what_cannot_be_gets_the_smallest_change(
    request_: Request, least: int, message: str
) -> None:
    with pytest.raises(Infeasible) as error:
        Planner(EVEN, least_stages=least).propose(request_)
    assert str(error.value).startswith(message)


def test_with_stages_of_a_few_numbers_some_nodes_cannot_be_used() -> None:
    planner = Planner(EVEN, least_stages=5, most_stages=5)
    with pytest.raises(Infeasible, match="17 nodes cannot be 1 to 24 pipelines of 5 nodes each: "):
        planner.propose(Request(17, 0, 24))
    with pytest.raises(Infeasible, match="leave 2 nodes out or add 3 nodes"):
        planner.propose(Request(17, 0, 24))


def test_memory_decides_how_short_a_pipeline_may_be() -> None:
    planner = Planner(SIZED, limit=750)
    with pytest.raises(Infeasible, match="9 nodes, 2 pipelines of at least 5 need 10"):
        planner.propose(Request(9, 1, 32))
    assert sizes(planner.propose(Request(11, 1, 32))[0].arrangement) == [5, 6]


def test_too_little_memory_is_said_with_how_much_would_do() -> None:
    with pytest.raises(Infeasible, match="no cut into 2 to 8 stages fits into 500 bytes") as error:
        Planner(SIZED, limit=500).propose(Request(8, 0, 8))
    words = str(error.value).split()
    enough = int(words[words.index("--memory") + 1].rstrip(","))
    assert Planner(SIZED, limit=enough).propose(Request(7, 0, 8))
    with pytest.raises(Infeasible):
        Planner(SIZED, limit=enough - 10).propose(Request(7, 0, 8))


def test_the_log_limits_the_microbatches_of_all_pipelines() -> None:
    planner = Planner(SIZED, limit=750)
    with pytest.raises(Infeasible, match="what is logged of 500 microbatches") as error:
        planner.propose(Request(10, 1, 500))
    words = str(error.value).split()
    most = int(words[words.index("--microbatches") + 1].rstrip(","))
    assert planner.propose(Request(10, 1, most))
    with pytest.raises(Infeasible):
        planner.propose(Request(10, 1, most + 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1, 1), "--nodes 0: it must be 1 or more"),
        ((1, -1, 1), "--fault-tolerance -1: it must be 0 or more"),
        ((1, 1, 0), "--microbatches 0: it must be 1 or more"),
    ],
)
def test_numbers_that_mean_nothing(values: tuple[int, int, int], message: str) -> None:
    with pytest.raises(Infeasible, match=message):
        Request(*values)


def test_stages_that_the_model_has_no_units_for() -> None:
    with pytest.raises(Infeasible, match="pipelines of 9 to 8 stages of a model of 8 units"):
        Planner(SIZED, least_stages=9)
    with pytest.raises(Infeasible, match="pipelines of 0 to 8 stages"):
        Planner(SIZED, least_stages=0)


def test_a_thousand_nodes() -> None:
    """Far too many multisets to look at each."""
    layers = (Unit(f"layer{i}", 0.01, 0.02) for i in range(96))
    costs = UnitCosts((Unit("embedding", 0.003, 0.004), *layers, Unit("head", 0.008, 0.012)))
    found = Planner(costs, least_stages=8).propose(Request(1000, 1, 4096))
    assert len(found) >= 20
    for one in found:
        assert one.arrangement.num_nodes == 1000
        assert sum(one.arrangement.microbatches) == 4096
        assert min(sizes(one.arrangement)) >= 8
        # No arrangement is faster than the work of all, spread evenly over the nodes.
        assert one.simulated_seconds >= 4096 * (96 * 0.03 + 0.007 + 0.02) / 1000
    times = [one.simulated_seconds for one in found]
    assert times == sorted(times)
