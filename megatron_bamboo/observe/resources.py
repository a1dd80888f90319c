"""What a process holds of the machine: counted, so that nobody leaks it from loss to loss."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """Counts of one process."""

    threads: int
    descriptors: int
    sockets: int
    """Among the descriptors."""

    @classmethod
    def now(cls) -> "Resources":
        """Those of this process, but for the descriptor that looking takes."""
        targets = [_target(name) for name in os.listdir("/proc/self/fd")]
        held = [target for target in targets if target]
        sockets = sum(target.startswith("socket:") for target in held)
        return cls(len(os.listdir("/proc/self/task")), len(held), sockets)


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # closed meanwhile, as the listing's own is
        return ""
