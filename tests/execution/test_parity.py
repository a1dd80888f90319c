"""With redundancy off the product gives Megatron-core's own bits.

One side is Megatron-core alone, with its schedule, communication, data parallelism, optimizer and
global state in a process a rank; the other is the product. Megatron divides the loss first by the
microbatches and then by the pipelines, the product once by both: equal where the pipelines are a
power of two. With clipping the norms would be added in another order, so it is off. Small shapes of
interleaved pipelines are compared one and all in ``test_interleaved_parity.py``.
"""

import json
import math
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from comparison import differing, of_kind
from processes import run_processes, worker_logs
from torch import Tensor
from trained_stages import Job, Run, StageTensors, load_stages

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


@dataclass(frozen=True, slots=True)
class Both:
    """What the two sides left, by pipeline and stage."""

    job: Job
    megatron: dict[str, StageTensors]
    product: dict[str, StageTensors]

    def of_megatron(self, prefix: str) -> dict[str, Tensor]:
        """Megatron's tensors with this prefix, of all pipelines."""
        return dict(of_kind(self.megatron, prefix))


SHAPES = ((2, 1, 4, 1), (2, 2, 2, 1), (4, 1, 8, 1), (4, 2, 2, 1), (2, 1, 4, 2), (4, 1, 8, 2))


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "P{}-D{}-M{}-C{}".format(*shape))
def both(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    data_flags: tuple[str, ...],
    context: ForkServerContext,
) -> Both:
    folder = tmp_path_factory.mktemp("parity")
    *sizes, num_chunks = request.param
    num_layers = max(4, sizes[0] * num_chunks)
    job = Job(*sizes, str(folder), data_flags, num_chunks=num_chunks, num_layers=num_layers)
    # The product's prepare phase builds the data's indices, which Megatron's side then reads.
    product = run_side(context, job, "product")
    return Both(job, run_side(context, job, "megatron"), product)


def test_every_loss_is_equal(both: Both) -> None:
    job, losses = both.job, both.of_megatron("loss/")
    assert len(losses) == 4 * job.num_pipelines * job.num_microbatches
    assert differing(both.megatron, both.product, "loss/") == []


def test_reduced_gradients_are_equal_after_every_step(both: Both) -> None:
    gradients = both.of_megatron("gradient/4/")
    assert {"gradient/4/embedding/embedding.word_embeddings.weight"} < gradients.keys()
    assert all(bool(gradient.any()) for gradient in gradients.values())
    assert differing(both.megatron, both.product, "gradient/") == []


def test_parameters_and_moments_are_equal_after_the_last_step(both: Both) -> None:
    kinds = {name.rpartition("/")[2] for name in both.of_megatron("state/")}
    assert kinds == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    assert differing(both.megatron, both.product, "state/") == []


def test_training_went_somewhere(both: Both) -> None:
    first, last = (mean(both.of_megatron(f"loss/{step}/")) for step in (1, 4))
    assert last < first - 0.1


def test_workers_print_nothing(both: Both) -> None:
    assert worker_logs(both.job).count("---") == both.job.num_workers
    assert all(line.startswith("---") for line in worker_logs(both.job).split("\n") if line)


def test_the_reported_loss_and_norm_are_those_of_the_step(both: Both) -> None:
    lines = (both.job.job_dir / "losses.jsonl").read_text().splitlines()
    for report in map(json.loads, lines):
        step = report["step"]
        assert float.fromhex(report["loss"]) == mean(both.of_megatron(f"loss/{step}/"))
        gradients = both.of_megatron(f"gradient/{step}/")
        # The tied weight is one parameter: its second copy does not count.
        gradients.pop(f"gradient/{step}/head/output_layer.weight")
        squares = sum(float(torch.linalg.vector_norm(g)) ** 2 for g in gradients.values())
        assert float.fromhex(report["grad_norm"]) == pytest.approx(math.sqrt(squares), rel=1e-12)


def mean(losses: dict[str, Tensor]) -> float:
    """In the order of the global microbatches, as the commit adds them."""
    total = 0.0
    for name in sorted(losses, key=lambda name: int(name.rpartition("/")[2])):
        total += float(losses[name])
    return total / len(losses)


def run_side(context: ForkServerContext, job: Job, side: str) -> dict[str, StageTensors]:
    """Train on one side; by pipeline and stage what it left."""
    result = Path(job.folder) / side
    if side == "megatron":
        ranks = [([Run(job, result)], rank) for rank in range(job.num_workers)]
        run_processes(context, job, "megatron_side", "train_rank", ranks)
    else:
        run_processes(context, job, "product_side", "train_job", [(job, result)])
    return load_stages(result)
