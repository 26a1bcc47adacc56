"""Addresses of tasks: ``host:port``, where the host is a name, an IPv4 address, or an IPv6 address
in brackets, such as ``[::1]:2222``."""

from __future__ import annotations

import contextlib
import socket
from typing import Any


def split(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of an ``address``."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def interface(host: str) -> str:
    """Returns the interface to listen on: one of loopback or all, since the address of another host
    name need not be one to bind to."""
    return {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}.get(host, "")


def bound(address: str, kind: socket.SocketKind) -> socket.socket:
    """Returns a socket of this ``kind`` that is bound to the port of an ``address`` of this
    machine, on its `interface`; all are those of IPv4 and IPv6.

    Raises:
        OSError: the port is taken.
    """
    host, port = split(address)
    loopback = interface(host)
    both = not loopback and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or loopback == "::1" else socket.AF_INET
    made = socket.socket(family, kind)
    try:
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((loopback, port))
    except BaseException:
        made.close()
        raise
    return made


def resolve(address: str, sender: socket.socket) -> Any:
    """Returns the ``address`` as ``sender``, a socket for datagrams, takes it.

    Raises:
        OSError: its host has no address that ``sender`` reaches.
    """
    host, port = split(address)
    mapped = 0
    if sender.family == socket.AF_INET6:  # it reaches IPv4 addresses by their IPv6 form
        mapped = socket.AI_V4MAPPED
        with contextlib.suppress(OSError):
            socket.inet_pton(socket.AF_INET, host)
            host = f"::ffff:{host}"
    return socket.getaddrinfo(host, port, sender.family, sender.type, flags=mapped)[0][4]
