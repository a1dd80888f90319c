"""Sizes from shapes alone are those of a stage that is really built."""

from itertools import repeat

import pytest
import torch
from gpt_parts import VOCAB_SIZE, MakeGpt
from megatron.core import parallel_state

from megatron_bamboo.model.optimizer_state import make_moments
from megatron_bamboo.model.profile import made_up_batch
from megatron_bamboo.model.saved_storages import SavedStorages
from megatron_bamboo.model.shapes import message_bytes, stage_sizes
from pretrain_gpt_bamboo import forward_step

FLAGS = {
    "plain": "",
    "half precision": "--bf16 --untie-embeddings-and-output-weights",
    "chunks": "--num-layers-per-virtual-pipeline-stage 1 --fp16",
    "gated": "--swiglu --disable-bias-linear --normalization RMSNorm",
}


@pytest.fixture(autouse=True)
def one_model_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron keeps for good that a model has chunks."""
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", None)


@pytest.mark.parametrize("kind", FLAGS)
def test_sizes_are_those_of_a_built_stage(gpt: MakeGpt, kind: str) -> None:
    made = gpt(f"--pipeline-model-parallel-size 2 {FLAGS[kind]}")
    made.begin()
    options = made.options
    sizes = stage_sizes(options, made.layout, made.shape, VOCAB_SIZE, made.provider, forward_step)
    for number, said in enumerate(sizes):
        stage = made.stage(number)
        make_moments(stage)
        units = stage.units.values()
        state = list(stage.state())
        assert said.parameters == sum(p.nbytes for unit in units for p in unit.parameters)
        assert said.gradients == sum(u.gradient.nbytes for u in units) + stage.reduced.nbytes
        assert said.optimizer == sum(t.nbytes for n, t in state if not n.endswith("/parameter"))
        assert said.stepped == stage.stepped_gradient().nbytes
        assert said.tied == (stage.tied_gradient().nbytes if stage.tied_unit else 0)
        for index, chunk in enumerate(said.chunks):
            losses = 8 * made.shape.num_microbatches
            is_end = (number, index) == (len(sizes) - 1, len(said.chunks) - 1)
            gradients = sum(gradient.nbytes for gradient in stage.gradients(index))
            assert chunk.mirror == gradients + losses * is_end


def test_nothing_that_was_changed_for_it_stays_changed(gpt: MakeGpt) -> None:
    """A forward saves now what it was said to save, drawing its masks as ever."""
    made = gpt("--pipeline-model-parallel-size 2")
    made.begin()
    said = stage_sizes(
        made.options, made.layout, made.shape, VOCAB_SIZE, made.provider, forward_step
    )
    assert message_bytes(made.options, made.layout) == 16 * 2 * 32 * 4
    (chunk,) = made.stage(0).chunks
    batch = made_up_batch(made.options, VOCAB_SIZE, torch.device("cpu"))
    saved = SavedStorages()
    with saved.recording():
        output, _ = forward_step(repeat(batch), chunk)
    assert saved.num_bytes([*chunk.parameters(), output]) == said[0].chunks[0].forward
