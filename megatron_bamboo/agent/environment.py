"""The environment variables by which a launcher speaks to a training script."""

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_bamboo.agent.job import JobSpec


def prepare_environment(job_dir: Path, num_nodes: int) -> dict[str, str]:
    """For the one run that checks the options and leaves ``job.json``, before any worker."""
    return {
        **os.environ,
        "BAMBOO_PHASE": "prepare",
        "BAMBOO_NUM_NODES": str(num_nodes),
        "BAMBOO_JOB_DIR": str(job_dir),
    }


def worker_environment(spec: JobSpec, node: str, store_address: str) -> Mapping[str, str]:
    """For a node's worker."""
    inject = [i.for_worker() for i in spec.injections if i.node == node]
    return {
        **os.environ,
        "BAMBOO_PHASE": "train",
        "BAMBOO_NUM_NODES": str(len(spec.nodes)),
        "BAMBOO_JOB_DIR": str(spec.job_dir),
        "BAMBOO_NODE": node,
        "BAMBOO_STORE": store_address,
        "BAMBOO_STORE_DEADLINE": f"{spec.deadlines.store_seconds:g}",
        "BAMBOO_INJECT": inject[0] if inject else "",
        # One thread a worker is a rule of correctness: more give other bits from run to run.
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # What a worker prints just before it is killed is what one wants to read.
        "PYTHONUNBUFFERED": "1",
    }
