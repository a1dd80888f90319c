import gc
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from shape_runs import ShapeRuns

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.data import train_tokenizer
from megatron_bamboo.membership.store_client import StoreClient

# The store server that runs beside the tests of membership runs beside these too.
sys.path.append(str(Path(__file__).parent.parent / "membership"))


LONGEST_END_SECONDS = 30.0


def pytest_sessionfinish() -> None:
    """Wait for groups that end: Python aborts where a thread of its own is in a C++ destructor."""
    gc.collect()
    until = time.monotonic() + LONGEST_END_SECONDS
    while any(t.name.startswith("ending-") for t in threading.enumerate()):
        if time.monotonic() > until:
            return
        time.sleep(0.05)


@pytest.fixture(scope="session")
def data_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("text")
    corpus = folder / "corpus.jsonl"
    lines = [f"Line {n}: " + "the quick brown fox jumps over it. " * (n % 7 + 1) for n in range(80)]
    corpus.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    files = ["--input", str(corpus), "--vocab-size", "300", "--output-dir", str(folder)]
    assert train_tokenizer.main(files) == 0
    flags = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    command = ["preprocess", "--input", str(corpus), "--output-prefix", str(folder / "x"), *flags]
    assert bamboo([*command, "--append-eod"]) == 0
    return ("--data-path", str(folder / "x_text_document"), "--split", "100,0,0", *flags)


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    """Forks from a process that has imported everything once and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_bamboo.training", "torch._dynamo"])
    return context


@pytest.fixture(scope="session")
def shape_runs(
    context: ForkServerContext,
    tmp_path_factory: pytest.TempPathFactory,
    data_flags: tuple[str, ...],
) -> ShapeRuns:
    """The trainings of small interleaved shapes, kept for all tests that ask for one."""
    return ShapeRuns(context, tmp_path_factory.mktemp("shapes"), data_flags)


@pytest.fixture
def server() -> Iterator[Any]:
    from server_thread import ServerThread

    running = ServerThread()
    yield running
    running.stop()


@pytest.fixture
def client(server: Any) -> Iterator[StoreClient]:
    from server_thread import store_client

    connected = store_client(server.address, 5)
    yield connected
    connected.close()
