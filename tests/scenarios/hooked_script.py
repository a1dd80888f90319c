"""The example's model in a loop that loses a node between two steps, in a collective of its own."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from own_loop import forward_step, make_datasets, make_model

from megatron_bamboo import training


def add_args(parser):
    parser.add_argument("--vanish", default="nobody@0", help="a node, and after which step")
    return parser


def count_nodes(step, groups):
    """How many run this pipeline, the hard way; one of them may vanish before it has said so."""
    node, _, moment = training.get_args().vanish.partition("@")
    if node == os.environ["BAMBOO_NODE"] and step == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
    number = torch.ones(1)
    dist.all_reduce(number, group=groups.pipeline)
    return int(number)


def train(hook):
    for step in hook.steps():
        after = hook.step(hook.as_megatron_does)
        number = hook.together(lambda groups, step=step: count_nodes(step, groups))
        told = f"step {step}: {number} nodes, epoch {after.plan.epoch}, next {after.next_step}\n"
        sys.stdout.write(told)


if __name__ == "__main__":
    training.train(train, make_datasets, make_model, forward_step, add_args)
