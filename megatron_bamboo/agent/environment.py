"""The environment variables by which a launcher speaks to a training script."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatron_bamboo.agent.job import JobSpec
from megatron_bamboo.membership.keys import Credential, NodeIdentity
from megatron_bamboo.membership.secret_file import without_secret
from megatron_bamboo.membership.workers import worker_name

SIGNS_VARIABLE = "BAMBOO_SIGNS"
NODE_KEY_VARIABLE = "BAMBOO_NODE_KEY"


def prepare_environment(
    job_dir: Path, num_nodes: int, workers_per_node: int, phase: str = "prepare"
) -> dict[str, str]:
    """For the one run that checks the options and leaves ``job.json``, before any worker; or, with
    the phase ``index``, builds the data's index caches and no more."""
    return {
        **without_secret(os.environ),
        "BAMBOO_PHASE": phase,
        "BAMBOO_NUM_NODES": str(num_nodes),
        "BAMBOO_WORKERS_PER_NODE": str(workers_per_node),
        "BAMBOO_JOB_DIR": str(job_dir),
    }


def worker_environment(
    spec: JobSpec, identity: NodeIdentity, tensor_rank: int, store: str
) -> Mapping[str, str]:
    """For one of a node's workers, which has the node's key and not the job's secret. A fault is
    the first one's to inject: the node dies whole."""
    node = identity.node
    inject = [str(i.fault) for i in spec.injections if i.node == node and tensor_rank == 0]
    return {
        **without_secret(os.environ),
        "BAMBOO_PHASE": "train",
        "BAMBOO_NUM_NODES": str(spec.num_nodes),
        "BAMBOO_JOB_DIR": str(spec.job_dir),
        "BAMBOO_WORKERS_PER_NODE": str(spec.shape.tensor_size),
        "BAMBOO_NODE": node,
        "BAMBOO_TENSOR_RANK": str(tensor_rank),
        "BAMBOO_STORE": store,
        NODE_KEY_VARIABLE: identity.to_text(),
        "BAMBOO_STORE_DEADLINE": f"{spec.deadlines.store_seconds:g}",
        "BAMBOO_START_STEP": str(spec.shape.start_step),
        "BAMBOO_INJECT": inject[0] if inject else "",
        # One thread a worker is a rule of correctness: more give other bits from run to run.
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": spec.interface,
        # With this sign no other one whose name begins alike.
        "NCCL_SOCKET_IFNAME": f"={spec.interface}",
        "BAMBOO_SPEAKER": spec.speaker,
        # What a worker prints just before it is killed is what one wants to read.
        "PYTHONUNBUFFERED": "1",
    }


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What the launcher tells a worker, read by the worker."""

    identity: NodeIdentity
    tensor_rank: int
    tensor_size: int
    job_dir: Path
    store: str
    """``host:port``, or the path of the file that says where it is now."""
    store_deadline_seconds: float
    inject: str
    signs: str = ""
    """Where the page is in which this worker shows signs of life to its agent."""
    start_step: int = 0
    """Steps that the checkpoint to go on from holds already."""
    speaker: str = "node0"
    """The node that speaks for the script."""

    @classmethod
    def read(cls) -> Self:
        """From the environment that the agent set."""
        return cls(
            identity=NodeIdentity.from_text(
                os.environ["BAMBOO_NODE"], os.environ[NODE_KEY_VARIABLE]
            ),
            tensor_rank=int(os.environ["BAMBOO_TENSOR_RANK"]),
            tensor_size=int(os.environ["BAMBOO_WORKERS_PER_NODE"]),
            job_dir=Path(os.environ["BAMBOO_JOB_DIR"]),
            store=os.environ["BAMBOO_STORE"],
            store_deadline_seconds=float(os.environ["BAMBOO_STORE_DEADLINE"]),
            inject=os.environ.get("BAMBOO_INJECT", ""),
            signs=os.environ.get(SIGNS_VARIABLE, ""),
            start_step=int(os.environ.get("BAMBOO_START_STEP", "0")),
            speaker=os.environ.get("BAMBOO_SPEAKER", "node0"),
        )

    @property
    def node(self) -> str:
        """The node's name."""
        return self.identity.node

    @property
    def credential(self) -> Credential:
        """By which the store knows this worker."""
        return self.identity.worker(self.worker)

    @property
    def worker(self) -> str:
        """This worker's name: its node's, where it is alone there."""
        return worker_name(self.node, self.tensor_rank, self.tensor_size)

    @property
    def speaks(self) -> bool:
        """Whether this worker speaks for the script: what each would say is said once."""
        return self.node == self.speaker and self.tensor_rank == 0
