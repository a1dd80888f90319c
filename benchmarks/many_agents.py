"""One coordinator and many agents: what it takes of memory, and how soon it decides about losses.

    python benchmarks/many_agents.py                          # 1,000 agents, 10 minutes
    python benchmarks/many_agents.py --agents 200 --minutes 1

The coordinator is the product's own, in its process. Agents and workers speak to it as real ones
do (``simulated_nodes.py``), from four processes, and pass a step a second. First only time passes.
Then one node of each pipeline dies, all at once and with all their connections, and when every
stage has two holders again, another one of each falls silent. A table of the coordinator's memory,
then a JSON line; it ends with 1 where a limit was passed.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# The product is no package of the benchmarks.
sys.path.append(str(Path(__file__).parents[1]))

from simulated_cluster import STAGES, STEP_SECONDS, Cluster

from megatron_bamboo.agent.job import LEASE_SECONDS

MOST_MIB, MOST_GROWTH_MIB, MOST_SECONDS = 300.0, 10.0, 1.0
DYING_STAGE, SILENT_STAGE = 3, 7
LINES = 20
"""Of the table."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Nodes that were lost together."""

    number: int
    epochs: int
    """In so many changes of the plan."""
    seconds: float
    """From the last one's end, its closed connection or the end of its lease, until the plan
    without any of them was in the store."""
    longest_seconds: float
    """From the first one's end."""
    seen_seconds: float
    """From the last one's end until a client of the store knew the plan."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What was measured."""

    agents: int
    minutes: float
    lease_seconds: float
    start_seconds: float
    """Until the first plan was out and all workers followed it."""
    processor_part: float
    """Of one processor, that the coordinator used while nothing happened."""
    mib: tuple[float, ...]
    """The coordinator's resident memory: from the start to the losses, after them, in the end."""
    died: Losses
    silent: Losses

    @property
    def is_good(self) -> bool:
        """Whether no limit was passed."""
        *quiet, _, _ = self.mib
        is_flat = quiet[-1] - quiet[0] <= MOST_GROWTH_MIB
        is_soon = max(self.died.seconds, self.silent.seconds) <= MOST_SECONDS
        return is_flat and is_soon and max(self.mib) <= MOST_MIB


def measure(folder: Path, agents: int, minutes: float, lease_seconds: float) -> Findings:
    """Run it all once."""
    began = time.monotonic()
    cluster = Cluster(folder / "job", agents, lease_seconds)
    try:
        cluster.await_start()
        start_seconds = time.monotonic() - began
        since, used = time.monotonic(), cluster.processor_seconds()
        mib = [_say_memory(cluster, began)]
        for _ in _steps(cluster, 60 * minutes):
            mib.append(_say_memory(cluster, began))
        processor_part = (cluster.processor_seconds() - used) / (time.monotonic() - since)
        died = _lose(cluster, "die", DYING_STAGE, 0.0)
        mib.append(_say_memory(cluster, began))
        cluster.await_healing(cluster.epoch())
        silent = _lose(cluster, "silent", SILENT_STAGE, lease_seconds)
        mib.append(_say_memory(cluster, began))
    finally:
        cluster.close()
    rounded = tuple(round(one, 1) for one in mib)
    part, start = round(processor_part, 3), round(start_seconds, 1)
    return Findings(agents, minutes, lease_seconds, start, part, rounded, died, silent)


def _steps(cluster: Cluster, seconds: float) -> Iterator[None]:
    """Pass steps for so long; a pause for each line of the table."""
    since = time.monotonic()
    for line in range(1, LINES + 1):
        while (now := time.monotonic()) < since + seconds * line / LINES:
            cluster.pass_step()
            until = min(now + STEP_SECONDS, since + seconds * line / LINES)
            time.sleep(max(0.0, until - time.monotonic()))
        yield


def _lose(cluster: Cluster, command: str, stage: int, lease_seconds: float) -> Losses:
    """Lose the node of a stage in each pipeline, and wait for the decision."""
    nodes = cluster.nodes[stage::STAGES]
    before = cluster.epoch()
    ends = [heard + lease_seconds for heard in cluster.order(command, nodes).values()]
    seen, epoch = cluster.await_plan_without(nodes, before)
    published = cluster.publications.of(epoch)
    seconds = (published - max(ends), published - min(ends), seen - max(ends))
    return Losses(len(nodes), epoch - before, *(round(one, 3) for one in seconds))


def _say_memory(cluster: Cluster, began: float) -> float:
    mib = cluster.memory_mib()
    seconds, used = time.monotonic() - began, cluster.processor_seconds()
    sys.stdout.write(f"{seconds:7.1f} s  {mib:6.1f} MiB  {used:6.1f} s of a processor\n")
    sys.stdout.flush()
    return mib


def main() -> int:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=1000, metavar="N", help="a multiple of 10")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--lease", type=float, default=LEASE_SECONDS, metavar="SECONDS")
    args = parser.parse_args()
    if args.agents < STAGES or args.agents % STAGES:
        parser.error(f"--agents {args.agents}: pipelines have {STAGES} stages")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        findings = measure(Path(folder), args.agents, args.minutes, args.lease)
    sys.stdout.write(json.dumps(asdict(findings)) + "\n")
    return 0 if findings.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
