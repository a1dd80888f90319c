"""What tells one order of samples from another."""

import torch

from megatron_bamboo.data.fingerprint import fingerprint


def samples(*numbers: int) -> list[dict[str, object]]:
    return [{"tokens": torch.tensor([number, 7]), "name": "x"} for number in numbers]


def test_equal_samples_in_one_order_have_one_fingerprint() -> None:
    assert fingerprint(samples(1, 2, 3), 3) == fingerprint(samples(1, 2, 3), 3)
    assert fingerprint(samples(1, 2, 3, 4), 3) == fingerprint(samples(1, 2, 3, 5), 3)


def test_others_in_another_order_or_number_have_others() -> None:
    base = fingerprint(samples(1, 2, 3), 3)
    for other in (samples(1, 3, 2), samples(1, 2, 4), samples(3, 2, 1)):
        assert fingerprint(other, 3) != base
    assert fingerprint(samples(1, 2, 3), 2) != base


def test_the_last_of_many_is_looked_at() -> None:
    many = list(range(1001))
    changed = [*many[:-1], 5]
    assert fingerprint(samples(*many), 1001) != fingerprint(samples(*changed), 1001)
