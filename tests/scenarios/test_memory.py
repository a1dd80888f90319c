"""What ``bamboo memory`` says of a run is what its workers' tensors then take."""

import json
import os
import subprocess
import sys

import pytest
from forked_jobs import ROOT, FinishedJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.schedule.footprint import Category

pytestmark = pytest.mark.multiprocess

ACCOUNT = "--bamboo-account-memory"
HOST, RECOMPUTE = (("--bamboo-replica-memory", name) for name in ("host", "recompute"))
UNTIED = "--untie-embeddings-and-output-weights"

CASES = {
    "none": (Shape(2, 1, num_steps=3), "none", ()),
    "lazy": (Shape(2, 2, num_steps=3), "lazy", ()),
    "eager": (Shape(3, 1, num_steps=3), "eager", ()),
    "bubble with chunks": (Shape(2, 1, num_steps=3, num_chunks=2), "bubble", (UNTIED,)),
    "bf16 and shards": (Shape(2, 2, num_steps=3, variant="zero-bf16"), "eager", ()),
    "mirrors": (Shape(2, 1, 8, num_steps=3, num_mirrors=3), "lazy", ()),
    "on the host": (Shape(2, 1, num_steps=3), "eager", HOST),
    "recomputed": (Shape(2, 1, num_steps=3, variant="bf16"), "eager", RECOMPUTE),
    "shared layers": (
        Shape(2, 1, 2, num_steps=3, variant="sequence-parallel", tensor_size=2),
        "eager",
        (),
    ),
}
# How many messages may have come before they are waited for; which is not to be told.
EARLY_MESSAGES = 2


def predicted(job: FinishedJob) -> list[dict[str, dict[str, int]]]:
    """By stage, as the command says it."""
    request = job.request
    sizes = ["--nodes", str(request.num_nodes), "--workers-per-node", str(request.workers_per_node)]
    command = [sys.executable, "-m", "megatron_bamboo", "memory", "--json", *sizes]
    done = subprocess.run(
        [*command, request.script, *request.flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nodes: list[dict[str, dict[str, int]]] = json.loads(done.stdout)
    return nodes


@pytest.mark.parametrize("name", in_ci(CASES, "bf16 and shards", "on the host"))
def test_each_category_is_what_was_said(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, flags = CASES[name]
    job = scenarios.run(shape, redundancy, more_flags=(ACCOUNT, *flags))
    assert job.result.status == 0, job.result.message
    nodes = predicted(job)
    events = job.events("memory")
    assert len(events) == shape.num_nodes * shape.tensor_size
    message = 16 * 32 * 4
    for event in events:
        _pipeline, stage = shape.place(event["source"].partition(":")[0])
        said, found = nodes[stage]["largest"], event["largest"]
        for category in Category:
            early = EARLY_MESSAGES * message if category is Category.MESSAGES else 0
            off = abs(found.get(category, 0) - said[category])
            assert off <= max(0.05 * said[category], early), (event["source"], category)
        total, foretold = (sum(at.values()) for at in (event["at_peak"], nodes[stage]["at_peak"]))
        assert total == pytest.approx(foretold, rel=0.05), event["source"]
