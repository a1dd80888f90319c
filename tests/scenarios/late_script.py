"""The product's script in which a worker comes late to a reduction, and its node dies then.

So the workers of another node find the loss in different units of one reduction.
"""

import os
import signal
import time

from torch import Tensor

from megatron_bamboo.execution.groups import GlooGroup
from megatron_bamboo.quiet import quiet_megatron_import
from pretrain_gpt_bamboo import (
    forward_step,
    model_provider,
    pretrain,
    train_valid_test_datasets_provider,
)

with quiet_megatron_import():
    from megatron.core.enums import ModelType

LATE = ("node2", "0")
FATAL_CALL = 8
"""The second unit of the third step."""
LATE_SECONDS = 1.0

calls = 0
all_reduce = GlooGroup.all_reduce


def all_reduce_late(self: GlooGroup, tensor: Tensor) -> None:
    global calls
    worker = os.environ["BAMBOO_NODE"], os.environ["BAMBOO_TENSOR_RANK"]
    if self.name.startswith("primaries/") and worker == LATE:
        calls += 1
        if calls == FATAL_CALL:
            time.sleep(LATE_SECONDS)
            os.killpg(os.getpgrp(), signal.SIGKILL)
    all_reduce(self, tensor)


if __name__ == "__main__":
    GlooGroup.all_reduce = all_reduce_late  # type: ignore[method-assign]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
