"""Which network interface leads where, and which one cannot be used."""

import socket
from collections.abc import Mapping
from types import SimpleNamespace

import psutil
import pytest
from launching import Launch

from megatron_bamboo.agent.interfaces import LOOPBACK, check_interface, interface_to
from megatron_bamboo.errors import UserError


def test_the_loopback_leads_to_this_machine_and_can_be_used() -> None:
    assert interface_to("127.0.0.1", 9) == LOOPBACK
    check_interface("--interface", LOOPBACK)


@pytest.mark.multiprocess
def test_a_job_of_this_machine_is_refused_with_an_interface_that_it_has_not(launch: Launch) -> None:
    launch.start(3, "--interface", "none0").wait(2)
    assert launch.err.startswith("bamboo run: --bamboo-interface none0: this machine has lo")
    assert launch.err.count("\n") == 1


def test_interfaces_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["lo", "eth0", "ib0"]
    hardware = SimpleNamespace(family=psutil.AF_LINK, address="02:00:00:00:00:01")
    address = SimpleNamespace(family=socket.AF_INET6, address="fd00::7")
    addresses: Mapping[str, list[SimpleNamespace]] = {
        "eth0": [hardware, address],
        "ib0": [hardware],
    }
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(known, 1)))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    check_interface("--bamboo-interface", "eth0")
    with pytest.raises(
        UserError, match=r"^--bamboo-interface eth1: this machine has lo, eth0, ib0$"
    ):
        check_interface("--bamboo-interface", "eth1")
    for name in ("ib0", "lo"):
        with pytest.raises(UserError, match=f"{name}: it has no address"):
            check_interface("--bamboo-interface", name)
