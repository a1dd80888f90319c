"""A stage's gradients, norms and optimizer step."""

import math

import pytest
import torch
from gpt_parts import MakeGpt, losses_of, random_tokens
from torch import Tensor

from megatron_bamboo.model.stage import Stage, build_scheduler

TWO = "--pipeline-model-parallel-size 2 "


def set_gradients(stage: Stage, seed: int = 3) -> dict[str, Tensor]:
    """Give a stage random reduced gradients; a copy of each by ``unit/parameter``."""
    stage.reduced.copy_(
        torch.randn(stage.reduced.shape, generator=torch.Generator().manual_seed(seed))
    )
    return {
        f"{unit.name}/{name}": unit.reduced_part(parameter).view(parameter.shape).clone()
        for unit in stage.units.values()
        for name, parameter in unit.named_parameters()
    }


def parameters(stage: Stage) -> dict[str, Tensor]:
    suffix = "/parameter"
    state = [(n.removesuffix(suffix), v) for n, v in stage.state() if n.endswith(suffix)]
    return {name: value.clone() for name, value in state}


def test_each_unit_has_a_part_of_one_flat_gradient(gpt: MakeGpt) -> None:
    stage = gpt(TWO).stage(0)
    assert list(stage.units) == ["embedding", "layer0", "layer1"]
    assert sum(unit.reduced.numel() for unit in stage.units.values()) == stage.reduced.numel()
    for number, unit in enumerate(stage.units.values()):
        unit.reduced.fill_(number + 1)
        assert unit.reduced.shape == unit.gradient.shape
    assert set(stage.reduced.tolist()) == {1.0, 2.0, 3.0}
    for unit in stage.units.values():
        sizes = [unit.reduced_part(p).numel() for _, p in unit.named_parameters()]
        assert sizes == [p.numel() for _, p in unit.named_parameters()]


def test_a_step_is_adamw(gpt: MakeGpt) -> None:
    flags = "--clip-grad 0 --weight-decay 0.1 --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-3"
    stage = gpt(TWO + flags).trained_stage(1)
    before, first, second = parameters(stage), {}, {}
    for step in (1, 2):
        for name, gradient in set_gradients(stage, seed=step).items():
            gradient, value = gradient.double(), before[name].double()
            first[name] = 0.8 * first.get(name, 0) + 0.2 * gradient
            second[name] = 0.9 * second.get(name, 0) + 0.1 * gradient**2
            decay = 0.1 if value.dim() > 1 else 0.0
            mean, square = first[name] / (1 - 0.8**step), second[name] / (1 - 0.9**step)
            before[name] = value * (1 - 1e-2 * decay) - 1e-2 * mean / (square.sqrt() + 1e-3)
        stage.apply(gradient_norm=1e9)
    for name, value in parameters(stage).items():
        torch.testing.assert_close(value.double(), before[name], rtol=1e-5, atol=1e-7)
    state = dict(stage.state())
    for name, value in first.items():
        torch.testing.assert_close(state[f"{name}/exp_avg"].double(), value, rtol=1e-5, atol=1e-6)
        assert state[f"{name}/step"] == 2


def test_a_step_has_the_bits_of_torchs_adamw(gpt: MakeGpt) -> None:
    stage = gpt(TWO + "--clip-grad 0").trained_stage(0)
    copies = {name: torch.nn.Parameter(value) for name, value in parameters(stage).items()}
    groups = [
        {"params": [p for p in copies.values() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in copies.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    for step in (1, 2, 3):
        for name, gradient in set_gradients(stage, seed=step).items():
            copies[name].grad = gradient
        optimizer.step()
        stage.apply(gradient_norm=1.0)
    for name, value in parameters(stage).items():
        assert torch.equal(value, copies[name]), name


def test_decay_is_of_matrices_alone(gpt: MakeGpt) -> None:
    stage = gpt(TWO + "--weight-decay 0.5").trained_stage(1)
    with torch.no_grad():
        for unit in stage.units.values():
            for _name, parameter in unit.named_parameters():
                parameter.add_(1.0)  # biases begin as zeros
    before = parameters(stage)
    stage.reduced.zero_()
    stage.apply(gradient_norm=0.0)
    for name, value in parameters(stage).items():
        kept = before[name] * (1 - 1e-2 * 0.5) if value.dim() > 1 else before[name]
        assert torch.equal(value, kept), name


@pytest.mark.parametrize(("norm", "factor"), [(4.0, 0.5 / 4.0), (0.25, 1.0)])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(
    gpt: MakeGpt, norm: float, factor: float
) -> None:
    stage = gpt(TWO + "--clip-grad 0.5").trained_stage(1)
    gradients = set_gradients(stage)
    stage.apply(norm)
    state = dict(stage.state())
    for name, gradient in gradients.items():
        torch.testing.assert_close(state[f"{name}/exp_avg"], 0.1 * factor * gradient)


def test_replica_and_primary_stay_equal(gpt: MakeGpt) -> None:
    primary, replica = gpt(TWO).stage(1), gpt(TWO).stage(1)
    for seed in (1, 2):
        set_gradients(primary, seed)
        replica.reduced.copy_(primary.reduced)
        for stage in (primary, replica):
            stage.apply(gradient_norm=30.0)
    ours, theirs = dict(primary.state()), dict(replica.state())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_state_is_named_by_unit_parameter_and_kind(gpt: MakeGpt) -> None:
    stage = gpt(TWO).stage(1)
    assert {name.rpartition("/")[2] for name, _ in stage.state()} == {"parameter"}
    set_gradients(stage)
    stage.apply(gradient_norm=1.0)
    kinds = {
        name.rpartition("/")[2] for name, _ in stage.state() if name.startswith("layer2/layer.mlp")
    }
    assert kinds == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    assert {name.split("/")[0] for name, _ in stage.state()} == {"layer2", "layer3", "head"}


def test_each_microbatch_counts_once_in_every_step(gpt: MakeGpt) -> None:
    stage = gpt("--clip-grad 0").stage(0)

    def gradient(stage: Stage, *microbatches: int) -> Tensor:
        stage.start_step()
        for microbatch in microbatches:
            losses_of([stage], random_tokens(microbatch)).backward()
        return torch.cat([unit.gradient for unit in stage.units.values()])

    # A learning rate of next to nothing: the weights stay, the optimizer has run.
    for unit in stage.units.values():
        for group in unit.optimizer.param_groups:
            group["lr"] = 0.0
    expected = gradient(stage, 1, 2)
    for unit in stage.units.values():
        unit.reduced.copy_(unit.gradient)
    stage.apply(gradient_norm=1.0)
    assert torch.equal(gradient(stage, 1, 2), expected)


def test_a_tied_weight_counts_once_in_the_norm(gpt: MakeGpt) -> None:
    def squares(flags: str) -> tuple[float, float]:
        """The norm's square by the stages, and by the gradients of all parameters."""
        stages = gpt(TWO + flags).stages()
        gradients = [gradient for stage in stages for gradient in set_gradients(stage).items()]
        total = sum(stage.squared_norm(u) for stage in stages for u in stage.units.values())
        counted = [g for name, g in gradients if flags or name != "head/output_layer.weight"]
        return total, sum(float((g.double() ** 2).sum()) for g in counted)

    for flags in ("", "--untie-embeddings-and-output-weights"):
        total, expected = squares(flags)
        assert total == pytest.approx(expected, rel=1e-6)


def test_the_tied_gradient_is_a_part_of_both_ends(gpt: MakeGpt) -> None:
    first, last = gpt(TWO).stages()
    for stage, unit in ((first, "embedding"), (last, "head")):
        stage.tied_gradient().fill_(2.0)
        assert float(stage.reduced.sum()) == 2.0 * 128 * 32
        assert float(stage.units[unit].reduced.sum()) == 2.0 * 128 * 32


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr-decay-style constant --lr-warmup-iters 2", [0, 5e-3, 1e-2, 1e-2]),
        ("--lr-decay-style linear", [1e-2, 9e-3, 8e-3, 7e-3]),
        ("--lr-decay-style linear --lr-decay-iters 2 --min-lr 1e-3", [1e-2, 5.5e-3, 1e-3, 1e-3]),
        (
            "--lr-decay-style cosine",
            [5e-3 * (1 + math.cos(math.pi * step / 10)) for step in range(4)],
        ),
    ],
)
def test_the_learning_rate_counts_steps(gpt: MakeGpt, flags: str, expected: list[float]) -> None:
    model = gpt(TWO + flags)
    stages = dict(enumerate(model.stages()))
    batch = model.layout.global_batch_size
    scheduler = build_scheduler(stages, model.options.optimizer, 10, batch)
    for rate in expected:
        units = [unit for stage in stages.values() for unit in stage.units.values()]
        (given,) = {group["lr"] for unit in units for group in unit.optimizer.param_groups}
        assert given == pytest.approx(rate)
        scheduler.step(batch)
