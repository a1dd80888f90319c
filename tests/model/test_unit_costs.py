"""Each unit has its times and bytes, and those of a stage are its units' together."""

import json

import pytest
from gpt_parts import VOCAB_SIZE, MakeGpt
from megatron.core import parallel_state

from megatron_bamboo.model.shapes import message_bytes, stage_sizes
from megatron_bamboo.model.unit_costs import measure_units, units_table
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.schedule.costs import Costs
from pretrain_gpt_bamboo import forward_step

CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"


@pytest.fixture(autouse=True)
def one_model_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron keeps for good that a model has chunks."""
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", None)


def costs_of(gpt: MakeGpt, flags: str) -> UnitCosts:
    made = gpt(f"--pipeline-model-parallel-size 2 {flags}")
    made.begin()
    arguments = (made.options, made.layout, VOCAB_SIZE, made.provider, forward_step)
    return measure_units(*arguments, repeats=1)


@pytest.mark.parametrize("flags", ["", "--bf16 --untie-embeddings-and-output-weights"])
def test_the_units_of_a_stage_make_up_what_it_takes(gpt: MakeGpt, flags: str) -> None:
    costs = costs_of(gpt, flags)
    names = ["embedding", "layer0", "layer1", "layer2", "layer3", "head"]
    assert [unit.name for unit in costs.units] == names
    made = gpt(f"--pipeline-model-parallel-size 2 {flags}")
    stages = stage_sizes(
        made.options, made.layout, made.shape, VOCAB_SIZE, made.provider, forward_step
    )
    sizes = [unit.bytes for unit in costs.units if unit.bytes is not None]
    message = message_bytes(made.options, made.layout)
    assert costs.message_bytes == message
    for stage, units in zip(stages, (sizes[:3], sizes[3:]), strict=True):
        state = stage.parameters + stage.gradients + stage.optimizer
        assert sum(unit.state for unit in units) == state
        # What units give to each other within a stage is saved there, if anything needs it.
        saved = sum(unit.activations for unit in units) + message * (len(units) - 1)
        assert 0.9 * saved <= stage.chunks[0].forward <= saved


def test_a_model_with_chunks_has_the_same_units(gpt: MakeGpt) -> None:
    plain, chunked = costs_of(gpt, ""), costs_of(gpt, CHUNKS)
    assert [unit.bytes for unit in chunked.units] == [unit.bytes for unit in plain.units]


def test_one_file_holds_the_costs_of_chunks_and_of_units(gpt: MakeGpt) -> None:
    units = costs_of(gpt, "")
    chunks = Costs(forward=(1.0, 2.0), backward=(3.0, 4.0))
    text = json.dumps(json.loads(chunks.to_json()) | units.to_json())
    assert (Costs.from_json(text), UnitCosts.from_json(text)) == (chunks, units)
    assert len(list(units_table(units))) == 2 + 6
