"""A shaped link takes the time of the bytes, one message after the other."""

import threading
import time

import torch

from megatron_bamboo.execution.shaped_link import Link, ShapedGroup

MESSAGE = torch.zeros(2500)  # 10 kB
SECONDS = 0.05


class FakeGroup:
    """A group whose messages are there at once."""

    name, members, has_tags = "pair", ("node0", "node1"), True

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> None:
        tensor.fill_(tag)


def test_messages_of_all_channels_pass_one_after_the_other() -> None:
    link = Link(MESSAGE.nbytes / SECONDS)
    ends: list[float] = []
    start = time.monotonic()

    def receive(tag: int) -> None:
        tensor = MESSAGE.clone()
        ShapedGroup(FakeGroup(), link).receive(tensor, "node1", tag)  # type: ignore[arg-type]
        ends.append(time.monotonic() - start)
        assert tensor[0] == tag

    threads = [threading.Thread(target=receive, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(ends) == 3
    assert all(end >= number * SECONDS for number, end in enumerate(sorted(ends), start=1))


def test_an_idle_link_saves_up_nothing() -> None:
    link = Link(MESSAGE.nbytes / SECONDS)
    link.carry(MESSAGE.nbytes)
    time.sleep(3 * SECONDS)
    start = time.monotonic()
    link.carry(MESSAGE.nbytes)
    assert time.monotonic() - start >= SECONDS
