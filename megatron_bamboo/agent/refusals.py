"""What a job is told of machines that must not join it: each says so itself, and is named once."""

from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.telling import is_new
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import Emitter

REFUSED = "refused/"
"""By machine why it must not join, in words."""


class Refusals:
    """Says who has found that it must not join; the job goes on undisturbed."""

    def __init__(self, table: Table, events: Emitter, reporter: Reporter) -> None:
        self._table = table
        self._events = events
        self._reporter = reporter
        table.subscribe(REFUSED, self._say)

    def _say(self, key: str, value: bytes) -> None:
        node, why = key.removeprefix(REFUSED), value.decode(errors="replace")
        with self._table.together():
            # One that is started again and again finds the same each time.
            if is_new(self._table, f"{key}/{why}"):
                self._events.emit("refused", node=node, cause=why)
                self._reporter.note(f"refused {node}: {why}")
