"""Tells the store which steps have passed, without making the training wait for it.

The first live node of the plan reports each step. After a loss whoever is first then reports the
latest steps once more, since its predecessor may have died before it could; the store keeps the
first report of a step, so nothing is said twice.
"""

import logging
import queue
import threading
from collections import deque

from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout

logger = logging.getLogger(__name__)

# As many steps as the first node can be behind with its reports when it dies.
_KEPT_REPORTS = 64


class StepReporter:
    """Writes ``passed/<step>`` from a thread of its own."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._latest: deque[StepReport] = deque(maxlen=_KEPT_REPORTS)
        self._queue: queue.SimpleQueue[StepReport | None] = queue.SimpleQueue()
        self._finishing = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def passed(self, report: StepReport, is_first: bool) -> None:
        """Remember a step's report, and write it where this node is the first."""
        self._latest.append(report)
        if is_first:
            self._queue.put(report)

    def repeat(self) -> None:
        """Write the latest reports again: this node may now be the first."""
        for report in list(self._latest):
            self._queue.put(report)

    def finish(self) -> None:
        """Write the last steps, whoever is first, and return when the store has them.

        A worker that leaves cannot hand over a commit vector later.
        """
        self._finishing.set()
        self.repeat()
        self._queue.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """End without a further word: what was not reported is undone."""
        self._is_abandoned = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            self._write(report)

    def _write(self, report: StepReport) -> None:
        """Write one report; a silent store is asked again for as long as the training goes on."""
        while not self._is_abandoned:
            try:
                self._client.compare_set(f"passed/{report.step}", None, report.to_json().encode())
                return
            except StoreTimeout as error:
                if self._finishing.is_set():
                    raise
                logger.warning("step %d is not reported yet: %s", report.step, error)
