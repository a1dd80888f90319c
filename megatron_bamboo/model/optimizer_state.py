"""What the optimizers of a stage keep, made before their first step where it is to be filled."""

from collections.abc import Iterator

import torch

from megatron_bamboo.model.stage import Stage

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_moments(stage: Stage) -> None:
    """What an optimizer makes in its first step, which may not have come or have been skipped."""
    for optimizer in optimizers_of(stage):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(optimizer.state[parameter] for parameter in parameters):
            continue
        for parameter in parameters:
            for kind in MOMENTS:
                optimizer.state[parameter][kind] = torch.zeros_like(parameter.data)
        set_step(optimizer, 0)


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """torch's optimizers count for each parameter, fused ones for each group."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.Adam):
            for parameter in group["params"]:
                optimizer.state[parameter]["step"] = torch.tensor(float(step))
        else:
            group["step"] = step


def optimizers_of(stage: Stage) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of all units of a stage."""
    for unit in stage.units.values():
        for optimizer in unit.optimizer.chained_optimizers:
            yield optimizer.optimizer
