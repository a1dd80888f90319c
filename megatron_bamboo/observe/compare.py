"""``bamboo compare RUN_A RUN_B``: are two runs the same, bit for bit?

Every claim of equality in this project is made with this command. First all copies of a tensor
within each run must agree (primaries, replicas, all pipelines), then the two runs with each other,
then the losses and gradient norms of the steps that both have, and the losses of evaluations. Bits
are compared, never values: two NaNs with the same bits are equal, 0.0 and -0.0 are not.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from megatron_bamboo.errors import UserError
from megatron_bamboo.observe.saved_copies import copies_of, whole_tensor
from megatron_bamboo.observe.saved_run import SavedRun, open_run

NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Difference:
    """Two copies of one tensor that are not the same bits."""

    name: str
    first: str
    second: str
    elements: int
    bits: int
    max_abs: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared and what differs."""

    num_tensors: int
    num_elements: int
    num_copies: int
    copies: tuple[Difference, ...]
    """Copies within one run that disagree."""
    tensors: tuple[Difference, ...]
    """Tensors, or loss scales, that differ between the runs."""
    num_losses: int
    steps: tuple[int, ...]
    """Steps whose loss or gradient norm differs."""
    max_loss_difference: float
    steps_of_one: range = range(0)
    """Steps that only one run has, since the other went on from a checkpoint."""
    num_evaluations: int = 0
    evaluations: tuple[str, ...] = ()
    """Evaluations of which a loss differs."""

    @property
    def parameters_equal(self) -> bool:
        """All saved tensors agree, within each run and between the runs."""
        return not self.copies and not self.tensors

    @property
    def losses_equal(self) -> bool:
        """All losses and gradient norms agree, those of evaluations too."""
        return not self.steps and not self.evaluations

    @property
    def equal(self) -> bool:
        """Nothing differs."""
        return self.parameters_equal and self.losses_equal


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare two job folders; a UserError if they cannot be compared."""
    first, second = open_run(a), open_run(b)
    if first.step != second.step:
        raise UserError(f"{a} was saved at step {first.step}, {b} at step {second.step}")
    steps = tuple(_differing_steps(first, second))
    # Both have every step from their first one on: that was checked when they were opened.
    shared = sorted(first.losses.keys() & second.losses.keys())
    if not shared:
        raise UserError(f"{a} and {b} have no step in common: compare runs that overlap")
    starts = sorted((first.start_step, second.start_step))
    num_elements, tensors = _compare_tensors(first, second)
    return Comparison(
        num_tensors=len(copies_of(first).keys() | copies_of(second).keys()),
        num_elements=num_elements,
        num_copies=sum(len(file.names) for run in (first, second) for file in run.files),
        copies=tuple(diff for run in (first, second) for diff in _disagreeing_copies(run)),
        tensors=(*tensors, *_differing_loss_scales(first, second)),
        num_losses=len(shared),
        steps=steps,
        max_loss_difference=max(_loss_difference(first, second, step) for step in shared),
        steps_of_one=range(starts[0] + 1, starts[1] + 1),
        num_evaluations=len(first.evaluations.keys() & second.evaluations.keys()),
        evaluations=tuple(_differing_evaluations(first, second)),
    )


def tensor_difference(
    name: str, first: tuple[str, torch.Tensor], second: tuple[str, torch.Tensor]
) -> Difference | None:
    """None if the two tensors have the same type, shape and bits."""
    (label_a, a), (label_b, b) = first, second
    if a.dtype != b.dtype or a.shape != b.shape:
        size = max(a.nbytes, b.nbytes)
        return Difference(name, label_a, label_b, max(a.numel(), b.numel()), 8 * size, math.inf)
    changed = _bytes(a) ^ _bytes(b)
    if not changed.any():
        return None
    elements = int(changed.reshape(a.numel(), -1).any(axis=1).sum())
    bits = int(numpy.bitwise_count(changed).sum())
    max_abs = float((a.double() - b.double()).abs().max())
    return Difference(name, label_a, label_b, elements, bits, max_abs)


def _bytes(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _disagreeing_copies(run: SavedRun) -> Iterator[Difference]:
    copies = copies_of(run)
    for name in copies:
        label, whole = whole_tensor(run, name, copies)
        for copy in copies[name]:
            other = f"{run.folder}: {copy.file.name}", copy.tensor
            if difference := tensor_difference(name, (label, copy.of(whole)), other):
                yield difference


def _compare_tensors(first: SavedRun, second: SavedRun) -> tuple[int, list[Difference]]:
    copies_a, copies_b = copies_of(first), copies_of(second)
    num_elements, differences = 0, []
    for name in sorted(copies_a.keys() | copies_b.keys()):
        wholes = [
            whole_tensor(run, name, copies) if name in copies else (f"{run.folder}: none", None)
            for run, copies in ((first, copies_a), (second, copies_b))
        ]
        num_elements += max(tensor.numel() for _, tensor in wholes if tensor is not None)
        if difference := _difference_or_missing(name, *wholes):
            differences.append(difference)
    return num_elements, differences


def _difference_or_missing(
    name: str, first: tuple[str, torch.Tensor | None], second: tuple[str, torch.Tensor | None]
) -> Difference | None:
    (label_a, a), (label_b, b) = first, second
    if a is not None and b is not None:
        return tensor_difference(name, (label_a, a), (label_b, b))
    present = a if a is not None else b
    assert present is not None, name
    return Difference(name, label_a, label_b, present.numel(), 8 * present.nbytes, math.inf)


def _differing_loss_scales(first: SavedRun, second: SavedRun) -> Iterator[Difference]:
    reference = first.files[0]
    for run in (first, second):
        for file in run.files:
            if file.loss_scale != reference.loss_scale:
                labels = f"{first.folder}: {reference.name}", f"{run.folder}: {file.name}"
                scale, other = float.fromhex(file.loss_scale), float.fromhex(reference.loss_scale)
                yield Difference("loss_scale", *labels, 1, 0, abs(scale - other))


def _differing_steps(first: SavedRun, second: SavedRun) -> Iterator[int]:
    for step in sorted(first.losses.keys() & second.losses.keys()):
        if first.losses[step] != second.losses[step]:
            yield step


def _differing_evaluations(first: SavedRun, second: SavedRun) -> Iterator[str]:
    for key in sorted(first.evaluations.keys() & second.evaluations.keys()):
        if first.evaluations[key] != second.evaluations[key]:
            yield f"the {key[1]} evaluation of step {key[0]}"


def _loss_difference(first: SavedRun, second: SavedRun, step: int) -> float:
    (loss_a, _), (loss_b, _) = first.losses[step], second.losses[step]
    return abs(float.fromhex(loss_a) - float.fromhex(loss_b))


def format_comparison(comparison: Comparison) -> str:
    """The table that the command prints."""
    rows = [
        ("tensors", comparison.num_tensors, len(comparison.tensors)),
        ("elements", comparison.num_elements, sum(d.elements for d in comparison.tensors)),
        ("copies", comparison.num_copies, len(comparison.copies)),
        ("losses", comparison.num_losses, len(comparison.steps)),
    ]
    if number := comparison.num_evaluations:
        rows.append(("evaluated", number, len(comparison.evaluations)))
    lines = [f"{'':10}{'compared':>14}{'different':>12}"]
    lines += [f"{name:10}{compared:>14,}{differ:>12,}" for name, compared, differ in rows]
    num_bits = sum(d.bits for d in (*comparison.tensors, *comparison.copies))
    lines.append(
        f"differing bits {num_bits:,}, largest difference {_max_abs(comparison):g}, "
        f"of the loss {comparison.max_loss_difference:g}"
    )
    if alone := comparison.steps_of_one:
        lines.append(f"losses of steps {alone[0]} to {alone[-1]} not compared: one run has them")
    lines += _format_differences(comparison)
    lines += [f"  {text}" for text in comparison.evaluations[:NAMES_SHOWN]]
    lines.append("equal bit for bit" if comparison.equal else "DIFFERENT")
    return "\n".join(lines)


def _max_abs(comparison: Comparison) -> float:
    values = [d.max_abs for d in (*comparison.tensors, *comparison.copies)]
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


def _format_differences(comparison: Comparison) -> Iterator[str]:
    differences = (*comparison.copies, *comparison.tensors)
    for d in differences[:NAMES_SHOWN]:
        yield f"  {d.name}: {d.elements} elements by up to {d.max_abs:g} ({d.first} | {d.second})"
    if len(differences) > NAMES_SHOWN:
        yield f"  and {len(differences) - NAMES_SHOWN} more"
    if comparison.steps:
        yield f"  losses of steps {', '.join(map(str, comparison.steps[:NAMES_SHOWN]))}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two job folders."""
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="job folder of a run")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="job folder of another run")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 0 if the runs are equal, 1 if not."""
    comparison = compare_runs(args.run_a, args.run_b)
    print(format_comparison(comparison))
    return 0 if comparison.equal else 1
