"""How the faults of `chaos.py` are done that come from outside of a task."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from ctl.base import durable
from ctl.checkpoint import manifest
from ctl.errors import UsageError

_DISK = "size=64m"
_FILLER = "filler"
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x4000, 1 << 18, 2
_LISTEN, _CLOSED = "0A", "07"  # states in /proc/net/tcp and, of a bound socket, in /proc/net/udp

# What begins like TensorFlow's protocol: the preface of HTTP/2 (RFC 9113, section 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mounts a disk of 64 MiB on ``directory``, which this process and its children see.

    Raises:
        UsageError: it may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = not (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, _DISK.encode())
    )
    if not mounted:
        reason = os.strerror(ctypes.get_errno())
        raise UsageError(f"cannot mount a disk to fill ({reason}): run it as root")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(directory), _MNT_DETACH)


def fill(disk: Path) -> None:
    """Leaves no byte free."""
    with open(disk / _FILLER, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


def free(disk: Path) -> None:
    """Undoes `fill`."""
    (disk / _FILLER).unlink(missing_ok=True)


def ports(pids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The kinds (``socket.SOCK_STREAM`` or ``SOCK_DGRAM``) and ports on which processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry.path))
    for name, kind, state in (
        ("tcp", socket.SOCK_STREAM, _LISTEN),
        ("tcp6", socket.SOCK_STREAM, _LISTEN),
        ("udp", socket.SOCK_DGRAM, _CLOSED),
        ("udp6", socket.SOCK_DGRAM, _CLOSED),
    ):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in inodes:
                yield kind, int(fields[1].rpartition(":")[2], 16)


def send_garbage(pids: Sequence[int], randoms: random.Random) -> list[socket.socket]:
    """Sends to every port on which processes listen what nobody of the job would send. Returns
    connections that stay open until they are closed."""
    opened = []
    for kind, port in set(ports(pids)):
        for content in (
            b"",  # silence
            randoms.randbytes(300),
            b"two words",
            _PREFACE[: randoms.randrange(1, len(_PREFACE))],
            _PREFACE + randoms.randbytes(100),
        ):
            connection = socket.socket(socket.AF_INET, kind)
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(content)
                if kind == socket.SOCK_STREAM:
                    _leave(connection, randoms.choice(["open", "half open", "reset", "closed"]))
            opened.append(connection)
    return opened


def _leave(connection: socket.socket, how: str) -> None:
    if how == "half open":
        connection.shutdown(socket.SHUT_WR)
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how in ("reset", "closed"):
        connection.close()


def intact(checkpoints: Path) -> list[int]:
    """The steps of the checkpoints whose files are as their manifest says, ascending."""
    steps = []
    for saved in manifest.load_all(checkpoints):
        with contextlib.suppress(durable.Damaged):
            durable.verify(saved.path, saved.files)
            steps.append(saved.step)
    return steps


def to_resume_from(checkpoints: Path) -> int:
    """The step from which the next attempt must go on: the last one committed, or else the newest
    intact one before it, or else any; 0 if there is none."""
    steps = intact(checkpoints)
    last = manifest.end_of_history(checkpoints)
    return max((s for s in steps if s <= last), default=max(steps, default=0))


def damage(checkpoints: Path, how: str, randoms: random.Random) -> str:
    """Damages a file of the newest checkpoint, or the file that names it. Returns which file; ""
    and does nothing if there would be no other checkpoint."""
    steps = intact(checkpoints)
    if len(steps) < 2:
        return ""
    newest = manifest.path_of(checkpoints, steps[-1])
    latest = checkpoints / "latest.json"  # which may have been deleted before
    path = randoms.choice([*sorted(newest.iterdir()), *([latest] if latest.exists() else [])])
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(content[: randoms.randrange(len(content))])
    else:
        content[randoms.randrange(len(content))] ^= 1 << randoms.randrange(8)
        path.write_bytes(content)
    return str(path.relative_to(checkpoints))
