"""How far what was said of a run is off, and what is compared."""

from memory import Compared, _compare

from megatron_bamboo.schedule.footprint import Category

NOTHING = dict.fromkeys(Category, 0)
SAID = {
    "at_peak": NOTHING | {Category.PARAMETERS: 200},
    "largest": NOTHING | {Category.PARAMETERS: 200, Category.ACTIVATIONS: 100},
}
FOUND = {
    "source": "node1",
    "at_peak": {Category.PARAMETERS: 200},
    "largest": {Category.PARAMETERS: 200, Category.ACTIVATIONS: 104},
    "resident": 900,
}


def test_each_category_is_compared_at_the_peak_and_when_it_takes_most() -> None:
    assert list(_compare(SAID, FOUND)) == [
        Compared("node1", "parameters, at the peak", 200, 200),
        Compared("node1", "activations, at the peak", 0, 0),
        Compared("node1", "activations, when it takes most", 100, 104),
        Compared("node1", "together at the peak", 200, 200),
        Compared("node1", "resident memory, of all that the process has", None, 900),
    ]


def test_what_was_said_is_the_measure() -> None:
    assert Compared("node0", "x", 200, 190).off == Compared("node0", "x", 200, 210).off
    assert Compared("node0", "x", None, 9).off == Compared("node0", "x", 0, 0).off == 0.0
    assert Compared("node0", "x", 0, 9).off == float("inf")
    assert Compared("node0", "x", 2_000_000, 1_000_000).cells() == [
        *("node0", "x", "2.00", "1.00", "0.5000")
    ]
