"""Sockets of addresses: names, IPv4 and IPv6."""

from __future__ import annotations

import socket

import pytest

from ctl.distributed.cluster.addresses import bound, resolve, split


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_hosts_and_ports():
    assert split("host0:2222") == ("host0", 2222)
    assert split("[fd00::1]:2222") == ("fd00::1", 2222)


@pytest.mark.parametrize(
    ("host", "reached_by"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("localhost", ["127.0.0.1"]),
        ("[::1]", ["::1"]),
        ("some.host", ["127.0.0.1", "::1"]),  # all interfaces, of both kinds
        ("[fd00::7]", ["127.0.0.1", "::1"]),
    ],
)
def test_what_listens_where(host, reached_by):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    with bound(f"{host}:{port}", socket.SOCK_STREAM) as listener:
        listener.listen()
        reached = []
        for address in ("127.0.0.1", "::1"):
            try:
                socket.create_connection((address, port), timeout=5).close()
                reached.append(address)
            except ConnectionRefusedError:
                pass
    assert reached == reached_by


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]", "[::1]"),
        ("some.host", "127.0.0.1"),
        ("some.host", "localhost"),
        ("some.host", "[::1]"),
    ],
)
def test_datagrams_arrive(sender, receiver):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    one, other = free_port(), free_port()
    with (
        bound(f"{sender}:{one}", socket.SOCK_DGRAM) as sends,
        bound(f"{receiver}:{other}", socket.SOCK_DGRAM) as receives,
    ):
        receives.settimeout(20)
        sends.sendto(b"beat", resolve(f"{receiver}:{other}", sends))
        assert receives.recv(10) == b"beat"


def test_a_machine_without_ipv6_listens_by_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with bound("some.host:0", socket.SOCK_STREAM) as listener:
        assert listener.family == socket.AF_INET
