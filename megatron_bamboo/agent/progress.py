"""Whether a job that loses nodes still comes forward: one that does not must not go on for ever.

Data that ends each worker that reads it, or a machine that takes one after the other with it, would
else be answered with takeovers and standbys until nobody is left.
"""

import json

from megatron_bamboo.membership.table import Table

FAILURES_KEY = "failures"


class Failures:
    """How often nodes were lost since a step has passed; in the store, for any coordinator."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def note(self, passed_step: int) -> int:
        """Nodes are lost, and this is the newest step that has passed; how often that was so."""
        known = self._table.get(FAILURES_KEY)
        values = {"step": passed_step, "number": 0} if known is None else json.loads(known)
        number = values["number"] + 1 if values["step"] == passed_step else 1
        value = json.dumps({"step": passed_step, "number": number})
        self._table.set(FAILURES_KEY, value.encode())
        return number
