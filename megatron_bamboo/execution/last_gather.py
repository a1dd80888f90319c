"""After the last step each worker stays until all have that step's parameters."""

import time

from megatron_bamboo.execution.errors import DeadlineExceeded
from megatron_bamboo.execution.executor import Executor
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.membership.workers import node_of, workers_of
from megatron_bamboo.planner.plan import Plan

_POLL_SECONDS = 0.02


def await_gathers(
    executor: Executor, client: StoreClient, worker: str, tensor_size: int, seconds: float
) -> None:
    """Stay until all live workers have the last step's parameters.

    Whoever has not may need this one's once more. In each epoch it is asked anew; a worker that
    has ended before the epoch began has seen that all have them.

    Args:
        seconds: the longest wait.

    Raises:
        DeadlineExceeded: a worker neither had them nor was declared lost.
    """
    deadline = time.monotonic() + seconds
    while True:
        plan = executor.follow_plans()
        client.set(f"whole/{plan.epoch}/{worker}", b"1")
        missing = _without_gather(client, plan, tensor_size)
        if not missing:
            return
        if time.monotonic() > deadline:
            what = f"the last parameters in epoch {plan.epoch}"
            raise DeadlineExceeded(f"{', '.join(missing)} did not gather {what}")
        time.sleep(_POLL_SECONDS)


def _without_gather(client: StoreClient, plan: Plan, tensor_size: int) -> list[str]:
    """The live workers that are not known to have all parameters."""
    return [
        worker
        for worker in workers_of(map(node_of, plan.nodes), tensor_size)
        if client.get(f"whole/{plan.epoch}/{worker}") is None
        and client.get(f"done/{worker}") is None
    ]
