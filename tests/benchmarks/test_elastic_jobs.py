"""A real job whose node is lost and another joins, and what the benchmarks read from its log."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from curves import live_nodes, sample_complaints
from elastic_jobs import ElasticJob
from made_up_text import prepare_data
from orders import order_of, permute
from planned_changes import Record, changes_of
from timed_jobs import Emulation, job_context

from megatron_bamboo.execution import step_data
from megatron_bamboo.execution.compute import Compute

NUM_STEPS, BATCH = 12, 3
SECONDS = 300.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ElasticJob]:
    """Two stages, of which the second one's node is lost in the third step."""
    emulation = Emulation.equal(2, BATCH, 2, 0.3)
    flags = (*emulation.flags(), *prepare_data(tmp_path), "--train-iters", str(NUM_STEPS))
    job = ElasticJob(job_context(), tmp_path, 2, flags, partial(permute, 1, BATCH))
    yield job
    job.kill()


@pytest.mark.multiprocess
@pytest.mark.timeout(480)
def test_a_node_is_lost_and_another_takes_its_place(job: ElasticJob) -> None:
    job.add("node0")
    job.add("node1", "iter3:#4")
    job.wait(lambda: job.step >= 2, SECONDS)
    job.add("node2")
    log = job.finish(SECONDS)
    assert [event["node"] for event in log.of("loss")] == ["node1"]
    assert set(live_nodes(log).values()) >= {2}
    assert list(sample_complaints(log, NUM_STEPS, BATCH)) == []
    record = Record.of(log)
    assert any("node2 takes stage 1" in reason for reason in record.reasons.values())
    assert all(fetch.num_bytes > 0 for fetch in record.fetches) and record.fetches
    again = Record.from_fields(_through_json(record))
    assert again == record
    assert any(change.held_up is not None for change in changes_of({"job": [record]}, 0.3))


def _through_json(record: Record) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(asdict(record)))
    return values


def test_microbatches_change_places_with_their_samples_and_their_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Both are put back after the test.
    monkeypatch.setattr(step_data, "microbatch_samples", step_data.microbatch_samples)
    monkeypatch.setattr(Compute, "_set_context", _set_number)
    permute(7, 8)
    for step in (1, 2):
        read = [step_data.microbatch_samples(step - 1, place, 2, 16)[0] for place in range(8)]
        order = order_of(7, step, 8)
        assert read == [16 * (step - 1) + 2 * number for number in order]
        compute: Any = SimpleNamespace(_dropout=SimpleNamespace(microbatch=0))
        for place in range(8):
            Compute._set_context(compute, place, None, step)  # type: ignore[arg-type]
            assert compute._dropout.microbatch == order[place]


def _set_number(compute: Any, place: int, _schedule: object, _step: int) -> None:
    compute._dropout.microbatch = place
