"""What workers are told, and what they are not."""

import os
from pathlib import Path

import pytest

from megatron_bamboo.agent.environment import (
    WorkerEnvironment,
    prepare_environment,
    worker_environment,
)
from megatron_bamboo.agent.job import JobShape, JobSpec
from megatron_bamboo.membership.keys import Role, Secret
from megatron_bamboo.membership.secret_file import SECRET_VARIABLE
from megatron_bamboo.planner.arrangement import equal_pipelines

TEXT = "the secret of a job, which is long enough"
SHAPE = JobShape(
    equal_pipelines(2, 1, 2), "lazy", train_iters=2, global_batch_size=2, tensor_size=2
)


def test_a_worker_has_its_nodes_key_and_not_the_jobs_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, TEXT)
    secret = Secret.of(TEXT)
    spec = JobSpec(("node0", "node1"), SHAPE, tmp_path, interface="ib0")
    told = worker_environment(spec, secret.node("node1", "77"), 1, "127.0.0.1:9")
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("ib0", "=ib0")
    prepared = prepare_environment(tmp_path, 2, 2)
    shown = [value for env in (told, prepared) for value in env.values()]
    assert not any(TEXT in value or secret.key.hex() in value for value in shown)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    credential = WorkerEnvironment.read().credential
    assert credential.role == Role.parse({"kind": "worker", "name": "node1:1", "incarnation": "77"})
    assert credential.key == secret.key_of(credential.role)
    assert os.environ[SECRET_VARIABLE] == TEXT  # the launcher's own
