"""The product's script with a forward step that fails at will, as users' scripts do.

``--fault NODE:HOW@N`` (several times; ``all`` for any node) does it in the worker's N-th forward.
"""

import argparse
import os
import time

from megatron_bamboo.quiet import quiet_megatron_import
from pretrain_gpt_bamboo import (
    forward_step,
    get_args,
    model_provider,
    pretrain,
    train_valid_test_datasets_provider,
)

with quiet_megatron_import():
    from megatron.core.enums import ModelType

calls = 0


def add_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--fault", action="append", default=[])
    return parser


def faulty_forward_step(data_iterator, model):
    global calls
    calls += 1
    for fault in get_args().fault:
        node, _, rest = fault.partition(":")
        how, _, number = rest.partition("@")
        if node in ("all", os.environ["BAMBOO_NODE"]) and calls == int(number):
            fail(how, data_iterator)
    return forward_step(data_iterator, model)


def fail(how, data_iterator):
    match how:
        case "raise":
            raise RuntimeError("a bug")
        case "twice":
            next(data_iterator), next(data_iterator)
        case "leave":
            raise SystemExit(0)
        case "vanish":
            os._exit(0)
        case "hang":
            time.sleep(600)
        case _:
            raise ValueError(f"no such fault: {how}")


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        faulty_forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        extra_args_provider=add_args,
    )
