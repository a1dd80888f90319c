"""The slots of the commit vector, their exact text, and sums in one order."""

import itertools
import math
from dataclasses import replace

import pytest

from megatron_bamboo.execution.commit import (
    CommitLayout,
    DigestLayout,
    from_hex,
    to_hex,
    unit_parts,
)

UNITS = ("embedding", "layer0", "head")
LAYOUT = CommitLayout(UNITS, num_microbatches=6)


def added(contributions: list[list[float]]) -> list[float]:
    return [math.fsum(slots) for slots in zip(*contributions, strict=True)]


def test_every_unit_and_every_loss_has_a_slot_of_its_own() -> None:
    filled = [LAYOUT.fill({unit: 1.0}, {}) for unit in UNITS]
    filled += [LAYOUT.fill({}, {number: 1.0}) for number in range(6)]
    filled.append(LAYOUT.fill({}, {}, must_end=True))
    assert LAYOUT.size == len(filled) == 10
    assert [slots.index(1.0) for slots in filled] == list(range(10))
    assert all(sum(slots) == 1.0 and len(slots) == 10 for slots in filled)


def test_all_end_where_one_was_asked_to() -> None:
    asked, others = LAYOUT.fill({}, {0: 4.0}, must_end=True), LAYOUT.fill({}, {1: 8.0})
    assert LAYOUT.must_end(added([asked, asked, others]))
    assert not LAYOUT.must_end(added([others, others]))
    assert LAYOUT.loss(added([asked, others])) == 2.0


def test_a_unit_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError):
        LAYOUT.fill({"layer1": 1.0}, {})


def test_it_does_not_matter_who_holds_what() -> None:
    norms = {"embedding": 0.1, "layer0": 0.2, "head": 0.3}
    losses = [{0: 7.1, 2: 7.2, 4: 7.3}, {1: 8.1, 3: 8.2, 5: 8.3}]
    apart = added(
        [
            *(LAYOUT.fill({unit: norms[unit]}, {}) for unit in UNITS),
            *(LAYOUT.fill({}, losses[pipeline]) for pipeline in range(2)),
        ]
    )
    together = added([LAYOUT.fill(norms, losses[0]), LAYOUT.fill({}, losses[1])])
    assert apart == together
    assert LAYOUT.gradient_norm(apart) == math.sqrt(0.1 + 0.2 + 0.3)
    assert LAYOUT.loss(apart) == (7.1 + 8.1 + 7.2 + 8.2 + 7.3 + 8.3) / 6


def test_sums_are_made_from_the_first_slot_to_the_last() -> None:
    values = (1e16, 1.0, -1e16)
    sums = {math.sqrt(abs((a + b) + c)) for a, b, c in itertools.permutations(values)}
    assert len(sums) > 1, "the order must matter here"
    vector = (*values, 1e16, 1.0, -1e16, 1.0, 0.0, 0.0)
    assert LAYOUT.gradient_norm(vector) == 0.0
    assert LAYOUT.loss(vector) == 1 / 6


def test_each_copy_has_a_slot_for_its_digest() -> None:
    layout = DigestLayout.of(num_units=3, tensor_size=2, num_pipelines=2)
    assert len(layout.copies) == len(set(layout.copies)) == 3 * 2 * 2 * 2 * 2
    largest = {copy: 2**52 - 1 - n for n, copy in enumerate(layout.copies)}
    one, other = (
        {copy: largest[copy] for copy in layout.copies if copy.is_replica is is_replica}
        for is_replica in (False, True)
    )
    assert layout.read(added([layout.fill(one), layout.fill(other)])) == largest
    assert layout.read(layout.fill(one)) == one
    with pytest.raises(AssertionError, match="no slot"):
        layout.fill({replace(layout.copies[0], pipeline=2): 1})


def test_digests_are_no_part_of_norm_and_loss() -> None:
    vector = [1.0, 4.0, 4.0, *[2.0] * 6]
    assert LAYOUT.gradient_norm([*vector, 7e9]) == LAYOUT.gradient_norm(vector) == 3.0
    assert LAYOUT.loss([*vector, 7e9]) == LAYOUT.loss(vector) == 2.0


def test_text_keeps_every_bit() -> None:
    vector = (0.1, -0.0, 1e-320, 1.7976931348623157e308, math.inf)
    assert from_hex(to_hex(vector)) == vector
    assert math.copysign(1.0, from_hex(to_hex(vector))[1]) == -1.0
    assert math.isnan(from_hex(to_hex([math.nan]))[0])
    assert to_hex([0.1]) == ("0x1.999999999999ap-4",)


def test_parts_of_units_are_in_model_order_and_differ() -> None:
    parts = unit_parts(num_units=13, tensor_size=2)
    assert len(set(parts)) == len(parts) == 26
    assert parts[:4] == ("embedding/0", "embedding/1", "layer0/0", "layer0/1")
    assert parts[-4:] == ("layer10/0", "layer10/1", "head/0", "head/1")
