from collections.abc import Iterator
from pathlib import Path

import pytest
from server_thread import ServerThread, store_client
from store_kinds import KINDS, Store

from megatron_bamboo.membership.store_client import StoreClient


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A job's store, of each kind."""
    etcd = request.getfixturevalue("etcd") if request.param == "etcd" else None
    made = Store(tmp_path, etcd)
    yield made
    made.close()


@pytest.fixture
def server(store: Store) -> Iterator[ServerThread]:
    """With a table that is kept in etcd, or by nobody: a journal on disk is one thread's."""
    running = ServerThread(table=store.lead()[1] if store.is_in_etcd else None)
    yield running
    running.stop()


@pytest.fixture
def client(server: ServerThread) -> Iterator[StoreClient]:
    connected = store_client(server.address, 5)
    yield connected
    connected.close()
