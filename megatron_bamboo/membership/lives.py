"""Names of nodes that were lost and started again.

All that a node may say, write and run goes by its name, and a name that was declared lost is
refused for ever. So a node that is started again is another one, ``node5.2`` after ``node5``: it
waits as a standby, and whatever may still run of its first life can do nothing.
"""

_MARK = "."


def next_life(node: str) -> str:
    """The name of a node when it is started again."""
    machine, _, number = node.partition(_MARK)
    return f"{machine}{_MARK}{int(number or 1) + 1}"


def last_life(node: str) -> str | None:
    """The name that a node had before it was started again; None if it was not."""
    machine, _, number = node.partition(_MARK)
    if not number.isdecimal() or number != str(int(number)) or int(number) < 2:
        return None
    return machine if int(number) == 2 else f"{machine}{_MARK}{int(number) - 1}"


def first_life(node: str) -> str:
    """The name with which a node was started first."""
    while (before := last_life(node)) is not None:
        node = before
    return node
