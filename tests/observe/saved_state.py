"""Job folders as runs leave them, for the tests that compare them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.planner.arrangement import equal_pipelines

Losses = dict[int, tuple[float, float]]
LOSSES: Losses = {1: (7.25, 3.1), 2: (7.0, 0.1)}
UNITS = (("embedding", "word.weight"), ("layer0", "mlp.bias"), ("head", "norm.weight"))


def save_job(folder: Path, num_layers: int = 1, **changes: int) -> None:
    """The shape of a job of one stage and two steps."""
    numbers = {"train_iters": 2, "global_batch_size": 4}
    arrangement = equal_pipelines(1, 2, 2, layers_per_chunk=num_layers)
    JobShape(arrangement, redundancy="lazy", **(numbers | changes)).write(folder)


def save_state(folder: Path, name: str, step: int = 2, loss_scale: str = (1.0).hex()) -> Path:
    """Save every unit as one worker would; the same bits each time."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{unit}/{parameter}/{kind}": torch.randn(3, 4, generator=generator).to(dtype)
        for unit, parameter in UNITS
        for kind, dtype in (("parameter", torch.bfloat16), ("exp_avg", torch.float32))
    }
    tensors["layer0/mlp.bias/step"] = torch.tensor(float(step))
    metadata = {"pipeline": "0", "stage": "0", "role": "primary", "step": str(step)}
    path = folder / "state" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata | {"loss_scale": loss_scale})
    return path


def save_losses(folder: Path, losses: Losses) -> None:
    lines = [
        json.dumps({"step": step, "loss": loss.hex(), "grad_norm": norm.hex()})
        for step, (loss, norm) in losses.items()
    ]
    (folder / "losses.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
