"""Network interfaces by which workers speak to each other: the one that is named, or that leads to
the coordinator.

gloo's ports listen on the address of that interface alone, and that address is what the others are
told; NCCL uses it for whatever does not go over InfiniBand.
"""

import socket

import psutil

from megatron_bamboo.errors import UserError

LOOPBACK = "lo"


def check_interface(flag: str, name: str) -> None:
    """UserError where this machine has no such interface, or one without an address.

    Args:
        flag: with which it was named.
    """
    known = [interface for _, interface in socket.if_nameindex()]
    if name not in known:
        raise UserError(f"{flag} {name}: this machine has {', '.join(known)}")
    families = {address.family for address in psutil.net_if_addrs().get(name, ())}
    if not families & {socket.AF_INET, socket.AF_INET6}:
        raise UserError(f"{flag} {name}: it has no address on this machine; give another, or one")


def interface_to(host: str, port: int) -> str:
    """The network interface of this machine that leads to an address; UserError without one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(address)  # nothing is sent
        except OSError as error:
            raise UserError(f"no way leads to the coordinator at {host} ({error})") from error
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in (each.address for each in addresses):
            return str(name)
    raise UserError(f"no interface of this machine has its address {own}: give --interface")
