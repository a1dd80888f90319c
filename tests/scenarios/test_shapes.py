"""Losses in shapes that are not the plain one: chunks, shared layers, recomputation."""

import pytest
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

INTERLEAVED = Shape(3, 1, num_steps=4, num_chunks=2)
SHARED = Shape(2, 1, 2, num_steps=4, tensor_size=2)
ALL_AT_ONCE = Shape(2, 2, 3, num_steps=4, variant="sequence-parallel", num_chunks=2, tensor_size=2)

CASES = [
    (INTERLEAVED, "lazy", "node0@iter2:0.1B1"),
    (INTERLEAVED, "eager", "node1@iter2:1.0B2"),
    (INTERLEAVED, "bubble", "node2@iter2:2.1F3"),
    # Fewer microbatches than stages, and a remainder: Megatron refuses both.
    (Shape(3, 2, 2, num_steps=4, num_chunks=2), "eager", "node3@iter2:0.1SEND_F1"),
    (Shape(2, 1, 5, num_steps=4, num_chunks=2), "lazy", "node1@iter2:1.0RECV_F4"),
    (SHARED, "lazy", "node0@iter2:0.0B1"),
    (SHARED, "eager", "node1@iter2:1.0F1"),
    (ALL_AT_ONCE, "bubble", "node2@iter2:0.1B1"),
    (Shape(3, 1, num_steps=4, variant="untied-rope"), "lazy", "node2@iter2:2.0B1"),
    (Shape(2, 1, num_steps=4, variant="recompute"), "eager", "node0@iter2:0.0B1"),
    (Shape(2, 1, num_steps=4, variant="recompute-attention"), "lazy", "node1@iter2:1.0B3"),
    (Shape(2, 3, num_steps=4, variant="bf16"), "eager", "node2@iter2:0.0B1"),
    (Shape(3, 1, num_steps=7, variant="fp16", num_chunks=2), "lazy", "node1@iter2:1.1B2"),
    (Shape(2, 1, num_steps=4, variant="fp16", tensor_size=2), "bubble", "node1@iter3:1.0F3"),
    # A script written for Megatron-LM, of which one import was changed.
    (Shape(2, 2, num_steps=4, variant="ported", num_chunks=2), "eager", "node1@iter2:1.0F2"),
    (Shape(2, 1, 3, num_steps=4, variant="ported", tensor_size=2), "lazy", "node0@iter2:0.0B1"),
]


def name_of(case: tuple[Shape, str, str]) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", in_ci(CASES, *CASES[1::2]), ids=name_of)
def test_a_loss_changes_no_bit_in_any_shape(
    scenarios: ScenarioRunner, case: tuple[Shape, str, str]
) -> None:
    shape, redundancy, injection = case
    victim = injection.partition("@")[0]
    assert scenarios.survive(shape, redundancy, [victim], injection) == []
