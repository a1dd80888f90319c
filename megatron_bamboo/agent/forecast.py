"""How long it is until the next node comes or goes, by what this coordinator has seen of them.

Changes that are weighed by it say so in the event log, with the numbers, once for each answer.
"""

from collections.abc import Callable, Hashable
from dataclasses import asdict

from megatron_bamboo.observe.events import Emitter
from megatron_bamboo.recovery.outlook import Weighing, expected_seconds
from megatron_bamboo.recovery.view import History


class Forecast:
    """What has come and gone so far, and what was weighed last."""

    def __init__(self, events: Emitter, now: Callable[[], float]) -> None:
        self._events = events
        self._now = now
        self._began = now()
        self._moments: list[float] = []
        self._said: tuple[int, Hashable, bool] | None = None

    def saw(self, num_nodes: int) -> None:
        """So many nodes have come or gone just now."""
        self._moments += [self._now()] * num_nodes

    @property
    def expected_seconds(self) -> float:
        """Until the next one does."""
        return expected_seconds(History(self._began, tuple(self._moments)), self._now())

    def pays(
        self, event: str, epoch: int, what: Hashable, weighing: Weighing, **told: object
    ) -> bool:
        """Whether a change does.

        Args:
            event: the name under which the answer is logged, if it is another one than before.
            what: the change; ``told`` is what the event says of it.
        """
        said = (epoch, what, weighing.pays)
        if said != self._said:
            self._said = said
            numbers = {"unchanged": weighing.unchanged, "changed": weighing.changed}
            self._events.emit(
                event, epoch=epoch, pays=weighing.pays, **told, **asdict(weighing), **numbers
            )
        return weighing.pays
