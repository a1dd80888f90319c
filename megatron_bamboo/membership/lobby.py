"""Who may wait before it has proven who it is, when more come than there is room for."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Guest = TypeVar("Guest", bound=Hashable)


class Lobby(Generic[Guest]):
    """Has so much room, and no more.

    Who has to leave is the one who has waited longest of the address that most have come from: a
    flood from one machine keeps nobody out who comes from another, and of its own machine only whom
    it outruns.
    """

    def __init__(self, room: int) -> None:
        assert room > 0
        self._room = room
        self._guests: dict[str, dict[Guest, None]] = {}
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def enter(self, guest: Guest, address: str) -> Guest | None:
        """Let one in; who has to leave for it, and counts no more."""
        self._guests.setdefault(address, {})[guest] = None
        self._number += 1
        if self._number <= self._room:
            return None
        crowded = max(self._guests, key=lambda address: len(self._guests[address]))
        oldest = next(iter(self._guests[crowded]))
        self.leave(oldest, crowded)
        return oldest

    def leave(self, guest: Guest, address: str) -> None:
        """One has proven itself, or is gone; of no effect for one that had to leave."""
        here = self._guests.get(address, {})
        if guest in here:
            del here[guest]
            self._number -= 1
        if not here:
            self._guests.pop(address, None)
