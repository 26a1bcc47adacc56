"""ctl.distributed.cluster.handshake: who is let in, and what strangers can do."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from waiting import wait_until

from ctl import launch
from ctl.distributed.cluster import handshake as doors
from ctl.distributed.cluster import secret
from ctl.distributed.cluster.handshake import HandshakeServer, handshake
from ctl.errors import UsageError

JOB, ANOTHER = "0" * 64, "1" * 64


@pytest.fixture(autouse=True)
def with_a_secret(monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "open sesame")


@pytest.fixture
def address() -> str:
    return launch.cluster(1)["worker"][0]


@pytest.fixture
def door(address) -> Iterator[HandshakeServer]:
    with HandshakeServer(address, "worker 0", JOB, ["worker 1", "worker 2"]) as opened:
        yield opened


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


@contextlib.contextmanager
def answering(door: HandshakeServer) -> Iterator[list[tuple[str, socket.socket]]]:
    """Calls `HandshakeServer.arrivals` in a thread, and collects what it returns."""
    arrived, ended = [], threading.Event()

    def serve() -> None:
        while not ended.is_set():
            arrived.extend(door.arrivals(0.01))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield arrived
    finally:
        ended.set()
        thread.join()
        for _, connection in arrived:
            connection.close()


def test_a_task_is_let_in_and_stays_connected(door, address):
    with answering(door) as arrived:
        with handshake(address, "worker 0", "worker 2", JOB) as mine:
            wait_until(lambda: arrived)
            ((name, theirs),) = arrived
            theirs.sendall(b"beat\n")
            assert (name, mine.recv(10)) == ("worker 2", b"beat\n")
        assert door.differing == set()


def test_nothing_behind_the_answer_is_swallowed(address):
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        answer = secret.sign(f"welcome {JOB} worker 0") + b"\nbeat\n"
        thread = threading.Thread(target=lambda: listener.accept()[0].sendall(answer))
        thread.start()
        with handshake(address, "worker 0", "worker 1", JOB) as mine:
            assert mine.recv(10) == b"beat\n"
        thread.join()


def signed(text: str, by: str) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(secret.VARIABLE, by)
        return secret.sign(text) + b"\n"


HELLO = f"hello {JOB} worker 1"


@pytest.mark.parametrize(
    "words",
    [
        *(b"\n", b"\xff\n", b"1 x\n", f"1 {JOB}\n".encode(), b"GET / HTTP/1.1\r\n\r\n"),
        *(b"x" * 1000, f"{JOB} worker 1\n".encode(), f"{HELLO}\n".encode()),
        signed(HELLO, "")[:-1] + b" \n",
        signed(HELLO, ""),
        signed(HELLO, "another"),
        signed(f"welcome {JOB} worker 1", "open sesame"),
        signed(f"{HELLO}\x1b[2J", "open sesame"),
    ],
    ids=lambda words: str(words)[:40],
)
def test_a_stranger_is_ignored_and_gets_no_answer(door, address, words):
    with answering(door) as arrived, connect(address) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(words)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(300) == b""
        assert arrived == [] and door.differing == set()


def test_a_name_that_is_not_in_the_job_is_not_let_in(door, address):
    with answering(door) as arrived:
        handshake(address, "worker 0", "worker 3", JOB).close()
        handshake(address, "worker 0", "worker 2", JOB).close()
        wait_until(lambda: arrived)
        assert [name for name, _ in arrived] == ["worker 2"]


def test_other_addresses_are_noted_here_and_an_error_there(door, address):
    with answering(door) as arrived:
        with pytest.raises(UsageError, match=f"worker 0 at {address} has another list of addr"):
            handshake(address, "worker 0", "worker 1", ANOTHER)
        wait_until(lambda: door.differing)
        assert door.differing == {"worker 1"} and arrived == []
        handshake(address, "worker 0", "worker 1", JOB).close()
        wait_until(lambda: arrived)
        assert door.differing == set()


def test_a_task_at_the_wrong_address_is_an_error(door, address):
    with answering(door), pytest.raises(UsageError, match="says that it is worker 0: give each"):
        handshake(address, "worker 2", "worker 1", JOB)


def test_a_port_whose_packets_are_dropped_has_another_error_than_one_that_is_silent():
    """The doctor takes the first for a firewall, and an error without a number for a stranger."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = f"127.0.0.1:{full.getsockname()[1]}"
        stack.enter_context(connect(address))  # all that it has room for
        with pytest.raises(ConnectionError) as raised:
            handshake(address, "worker 0", "worker 1", JOB)
    assert raised.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize(
    "answers",
    [
        *([b""], [b"welcome"], [b"x" * 1000], [signed(f"welcome {JOB} worker 0", "another")]),
        [b"x"] * 1000,
    ],
    ids=["nothing", "a word", "much", "another secret", "a byte at a time"],
)
def test_what_answers_otherwise_is_no_task(monkeypatch, address, answers):
    monkeypatch.setattr(doors, "_GREETING_SECONDS", 0.3)
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                for words in answers:
                    connection.sendall(words)
                    time.sleep(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError):
            handshake(address, "worker 0", "worker 1", JOB)
        thread.join()


def test_the_oldest_of_many_strangers_is_sent_away(monkeypatch, door, address):
    monkeypatch.setattr(doors, "_MOST_STRANGERS", 5)
    with contextlib.ExitStack() as stack, answering(door) as arrived:
        strangers = [stack.enter_context(connect(address)) for _ in range(20)]
        for stranger in strangers[:15]:
            assert stranger.recv(1) == b""
        handshake(address, "worker 0", "worker 1", JOB).close()
        wait_until(lambda: arrived)


def test_who_is_silent_is_sent_away(monkeypatch, door, address):
    monkeypatch.setattr(doors, "_GREETING_SECONDS", 0.1)
    with answering(door), connect(address) as silent, connect(address) as slow:
        slow.sendall(b"hello")
        assert silent.recv(1) == slow.recv(1) == b""
