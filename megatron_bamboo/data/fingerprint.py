"""What tells one order of samples from another, without reading all of them.

A run that goes on from a checkpoint must see the samples that come next in the order that the
checkpoint began. Other data change the order, and so may another number of steps, once the data
are gone through more than once: Megatron shuffles as many epochs as the run needs.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset

_LOOKED_AT = 32


def fingerprint(dataset: "Dataset[Any]", num_samples: int) -> str:
    """A digest of some of the first ``num_samples`` samples, evenly spread, the last among them."""
    step = max(1, num_samples // _LOOKED_AT)
    digest = hashlib.sha256()
    for index in sorted({*range(0, num_samples, step), num_samples - 1}):
        digest.update(f"{index}:".encode())
        for part in _parts(dataset[index]):
            digest.update(part)
    return digest.hexdigest()


def _parts(sample: Any) -> Iterable[bytes]:
    values = sample.values() if isinstance(sample, dict) else [sample]
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            yield repr(value).encode()
