import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import Launch, OpenJob
from led_cluster import Cluster

from megatron_bamboo.agent.job import Deadlines

# A store server beside a test is made as in the tests of membership.
sys.path.append(str(Path(__file__).parent.parent / "membership"))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched = Launch(tmp_path)
    yield launched
    launched.clean()


@pytest.fixture
def open_job(tmp_path: Path) -> Iterator[OpenJob]:
    started = OpenJob(tmp_path)
    yield started
    started.clean()


@pytest.fixture
def lead(tmp_path: Path) -> Callable[..., Cluster]:
    """Run a coordinator beside a test's story."""

    def run(
        story: Callable[[Cluster], Awaitable[None]],
        deadlines: Deadlines = Deadlines(),  # noqa: B008
        standbys: Sequence[str] = (),
        **more: Any,
    ) -> Cluster:
        cluster = Cluster(tmp_path, deadlines, standbys, **more)

        async def both() -> None:
            async with asyncio.timeout(20):
                await asyncio.gather(cluster.coordinator.run(), story(cluster))

        asyncio.run(both())
        return cluster

    return run
