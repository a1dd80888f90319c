"""What a machine without CUDA needs, and that one with CUDA is left alone."""

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_bamboo.model import cpu

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def touched() -> list[object]:
    """Everything that ``install`` may replace."""
    factories = [getattr(torch, name) for name in cpu._FACTORIES]
    names = ("current_device", "synchronize", "get_rng_state", "manual_seed")
    return [
        *factories,
        *(getattr(torch.cuda, name) for name in names),
        torch.Tensor.cuda,
        random._get_cuda_rng_state,
        random._set_cuda_rng_state,
    ]


def test_it_is_installed_once() -> None:
    cpu.install()
    before = touched()
    cpu.install()
    assert all(now is then for now, then in zip(touched(), before, strict=True))


def test_nothing_happens_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    before = touched()
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu.install()
    assert all(now is then for now, then in zip(touched(), before, strict=True))
    assert not cpu._installed


@WITHOUT_CUDA
def test_the_cpu_answers_for_cuda() -> None:
    for device in ("cuda", torch.device("cuda", 0), torch.cuda.current_device()):
        assert torch.zeros(2, device=device).device.type == "cpu"
    assert torch.full((2,), 3.0, device="cuda").tolist() == [3.0, 3.0]
    assert torch.ones(2).cuda().device.type == "cpu"
    torch.cuda.synchronize()


@WITHOUT_CUDA
def test_other_devices_are_not_touched() -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.arange(3).device.type == "cpu"


@WITHOUT_CUDA
def test_megatrons_random_tracker_switches_the_cpus_generator() -> None:
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("some-region", 5)
    torch.manual_seed(1)
    outside = torch.rand(1)
    torch.manual_seed(1)
    with tracker.fork("some-region"):
        inside = torch.rand(1)
    assert torch.equal(torch.rand(1), outside)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), inside)
