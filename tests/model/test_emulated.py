"""Emulated layers take their time, one at a time on a node, and are real in all else."""

import itertools
import json
import os
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch
from gpt_parts import LAYERS, MakeGpt, losses_of, random_tokens

from megatron_bamboo.model.emulated import DEVICE, Device

FORWARD, BACKWARD = 0.01, 0.03
FLAGS = "--transformer-impl emulated --bamboo-emulated-forward-ms 10 "
FLAGS += "--bamboo-emulated-backward-ms 30 --pipeline-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
SECONDS = 20.0


def timed_passes(gpt: MakeGpt, flags: str) -> tuple[float, float, list[torch.nn.Parameter]]:
    """Seconds of a forward and a backward of the whole model, and its parameters."""
    stages = gpt(flags).stages()
    start = time.monotonic()
    loss = losses_of(stages, random_tokens())
    middle = time.monotonic()
    loss.backward()
    parameters = [p for stage in stages for chunk in stage.chunks for p in chunk.parameters()]
    return middle - start, time.monotonic() - middle, parameters


def test_each_layer_takes_its_time_and_has_a_gradient(gpt: MakeGpt) -> None:
    forward, backward, parameters = timed_passes(gpt, FLAGS)
    assert forward >= LAYERS * FORWARD
    assert backward >= LAYERS * BACKWARD
    assert len(parameters) > 6 * LAYERS
    assert all(parameter.main_grad.any() for parameter in parameters)


def test_a_recomputed_forward_takes_its_time_too(gpt: MakeGpt) -> None:
    _, backward, parameters = timed_passes(gpt, f"{FLAGS} {RECOMPUTE}")
    assert backward >= LAYERS * (FORWARD + BACKWARD)
    assert all(parameter.main_grad.any() for parameter in parameters)
    DEVICE.begin(0.0)  # it is free again
    DEVICE.end()


def test_layers_may_take_different_times(gpt: MakeGpt) -> None:
    forward, _, _ = timed_passes(gpt, f"{FLAGS} --bamboo-emulated-forward-ms 10,20,30,40")
    assert forward >= 0.1


def test_the_loss_depends_on_every_layer_and_on_the_input(gpt: MakeGpt) -> None:
    stages = gpt(FLAGS).stages()
    with torch.no_grad():
        before = losses_of(stages, random_tokens())
        assert losses_of(stages, random_tokens(8)) != before
        for stage in stages:
            for layer in stage.chunks[0].decoder.layers:
                layer.mlp.linear_fc2.weight.mul_(2.0)
                after = losses_of(stages, random_tokens())
                assert after != before
                before = after


def _use(descriptor: int, answer: Connection) -> None:
    """Compute a few times on a device that another process has too."""
    device = Device()
    # A description of its own, as each worker has: a lock belongs to that.
    device.share(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR), SECONDS)
    spans = []
    for _ in range(5):
        until = device.begin(0.01)
        spans.append((until - 0.01, until))
        device.end()
    answer.send(json.dumps(spans))


@pytest.mark.multiprocess
def test_workers_of_a_node_never_compute_at_the_same_time() -> None:
    context, descriptor = get_context("fork"), os.memfd_create("device-of-a-test")
    answers = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=_use, args=(descriptor, theirs)).start()
        answers.append(ours)
    spans = []
    for answer in answers:
        assert answer.poll(SECONDS), "it did not end"
        spans += json.loads(answer.recv())
    os.close(descriptor)
    assert overlaps(spans) == []


def test_threads_of_a_worker_never_compute_at_the_same_time() -> None:
    device = Device()
    spans: list[tuple[float, float]] = []

    def use() -> None:
        for _ in range(5):
            until = device.begin(0.005)
            spans.append((until - 0.005, until))
            device.end()

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(spans) == 15 and overlaps(spans) == []


def test_a_worker_that_keeps_the_device_is_named() -> None:
    descriptor = os.memfd_create("device-of-a-test")
    keeper, other = Device(), Device()
    for device in (keeper, other):
        device.share(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR), 0.05)
    keeper.begin(0.0)
    with pytest.raises(TimeoutError, match="the emulated device was kept"):
        other.begin(0.0)


def overlaps(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans that begin before the one before them has ended."""
    ordered = sorted(spans)
    return [later for earlier, later in itertools.pairwise(ordered) if later[0] < earlier[1]]
