"""No deadline for a single example: other work on the machine must not fail a test."""

from collections.abc import Iterator

import pytest
from etcd_cluster import Cluster, cluster
from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def etcd() -> Iterator[Cluster]:
    """One member of a real etcd, for all tests that only want one to be there."""
    with cluster(1) as running:
        yield running
