"""Pretrain a GPT on nodes that can vanish: Megatron-LM's script, started by ``bamboo run``.

bamboo run --nodes 8 pretrain_gpt_bamboo.py --num-layers 8 ... --bamboo-redundancy eager
"""

from collections.abc import Iterator
from functools import partial

import torch

from megatron_bamboo.quiet import quiet_megatron_import
from megatron_bamboo.training import pretrain

with quiet_megatron_import():
    from megatron.core.models.gpt import GPTModel

Batch = dict[str, torch.Tensor]


def get_batch(data_iterator: Iterator[Batch], model: GPTModel) -> Batch:
    """The microbatch; only the chunks at the model's ends look at data."""
    if model.pre_process or model.post_process:
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        return {name: tensor.to(device) for name, tensor in next(data_iterator).items()}
    return {}


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss over the tokens that count; the second value is what is reported."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask) / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(data_iterator: Iterator[Batch], model: GPTModel) -> tuple[torch.Tensor, partial]:
    """Run one microbatch through one chunk."""
    batch = get_batch(data_iterator, model)
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        attention_mask=None,  # causal
        labels=batch.get("labels") if model.post_process else None,
    )
    return output, partial(loss_func, batch.get("loss_mask"))


if __name__ == "__main__":
    raise SystemExit(pretrain(forward_step))
