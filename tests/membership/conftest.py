from collections.abc import Iterator

import pytest
from server_thread import ServerThread, store_client

from megatron_bamboo.membership.store_client import StoreClient


@pytest.fixture
def server() -> Iterator[ServerThread]:
    running = ServerThread()
    yield running
    running.stop()


@pytest.fixture
def client(server: ServerThread) -> Iterator[StoreClient]:
    connected = store_client(server.address, 5)
    yield connected
    connected.close()
