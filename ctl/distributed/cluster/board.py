"""Where the launchers of an elastic job on several machines read what the others say.

Each launcher has a record, which it writes anew every second. The launchers also agree on plans:
which machines have the workers of the next attempt. A plan has a number, and the first one of a
number counts. The board is a directory that all machines see, or a service of the launcher on one
of them. Records and plans are signed (`ctl.distributed.cluster.secret`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import socket
import socketserver
import threading
import time
from pathlib import Path
from typing import Any

from ctl.distributed.cluster import addresses
from ctl.distributed.cluster.secret import VARIABLE, sign, verified
from ctl.errors import UsageError

NAME = re.compile(r"[\w.-]{1,80}", re.ASCII)
_ADDRESS = re.compile(r"[\w.:\[\]-]{1,255}:[0-9]{1,5}", re.ASCII)

RUNS, WAITS, AWAY, LEFT = "runs", "waits", "away", "left"

_SECONDS = 3.0  # for one exchange with the service

# The service ends when nobody has asked for so long, but does not wait longer than this for it.
_QUIET_SECONDS, _LINGER_SECONDS = 1.5, 5.0

_OLD_SECONDS = 3600.0  # of a record that nobody needs any more
_LONGEST = 1 << 20  # bytes of an exchange
_MOST_MACHINES, _MOST_CONNECTIONS = 1000, 100


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a launcher says of its machine.

    Attributes:
        name: unique among all launchers that have ever run.
        address: ``host:port`` of the worker that it starts next.
        state: `RUNS` a worker; `WAITS` for the next plan; is `AWAY` for a while, since its worker
            was lost; has `LEFT` the job.
        plan: number of the last plan that it has followed.
        code: exit code of its worker of that plan; -1 while it runs.
        trained: whether that worker has finished a call of its loop.
        broken: whether that worker has lost another.
        joins: whether it has asked that worker to stop; the job goes on, with other machines or
            without this one.
        beat: how many records came before this one.
    """

    name: str
    address: str
    state: str = WAITS
    plan: int = 0
    code: int = -1
    trained: bool = False
    broken: bool = False
    joins: bool = False
    beat: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The workers of an attempt.

    Attributes:
        number: of the plan, from 1.
        members: names of machines, in the order of the ranks.
        workers: ``host:port`` of the worker of each.
        failures: how many attempts in a row ended for want of workers.
        why: what is said when it begins.
    """

    number: int = 0
    members: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    failures: int = 0
    why: str = ""


def _text(record: Machine | Plan) -> str:
    return json.dumps(dataclasses.asdict(record))


def _machine(text: str | None) -> Machine | None:
    """The record of a message; None if no launcher of this job can have written it."""
    with contextlib.suppress(ValueError, TypeError):
        machine = Machine(**json.loads(text or ""))
        of_right_types = all(
            type(getattr(machine, field.name)).__name__ == field.type
            for field in dataclasses.fields(machine)
        )
        if of_right_types and NAME.fullmatch(machine.name) and _ADDRESS.fullmatch(machine.address):
            return machine
    return None


def _plan(text: str | None) -> Plan | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        values = json.loads(text or "")
        plan = Plan(**values | {key: tuple(values[key]) for key in ("members", "workers")})
        numbers = type(plan.number) is int and type(plan.failures) is int
        hosts = map(_ADDRESS.fullmatch, plan.workers)
        valid = all(hosts) and all(map(NAME.fullmatch, plan.members))
        if numbers and valid and len(plan.members) == len(plan.workers) and type(plan.why) is str:
            return plan
    return None


class DirectoryBoard:
    """A board in a directory that all machines see. It survives the loss of any machine. Jobs with
    another secret have other files there."""

    def __init__(self, directory: Path):
        self._directory = directory = directory / f"job-{sign('')[:12].decode()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--rendezvous: cannot make {directory}: {error.strerror}; give a directory that "
                "all machines see and may write to"
            ) from error

    def exchange(
        self, mine: Machine, proposed: Plan | None = None
    ) -> tuple[dict[str, Machine], Plan]:
        """Posts the record of this machine, and a plan. Returns all records and the newest plan.

        Raises:
            OSError: the directory cannot be read or written.
        """
        new, own = (self._directory / f"{kind}-{mine.name}" for kind in (".new", "machine"))
        if proposed:
            new.write_bytes(sign(_text(proposed)))
            try:
                os.link(new, self._directory / f"plan-{proposed.number}")
            except FileExistsError:
                pass  # the first of a number counts
            finally:
                new.unlink()  # else the next record would be written to the plan
        new.write_bytes(sign(_text(mine)))
        new.replace(own)
        now, machines = own.stat().st_mtime, {}  # by the clock of all files
        names = [file.name for file in os.scandir(self._directory)]
        plans = [name for name in names if re.fullmatch(r"plan-[0-9]+", name)]
        last = max((int(name.removeprefix("plan-")) for name in plans), default=0)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if name == f"plan-{last}":
                    continue
                if now - (self._directory / name).stat().st_mtime > _OLD_SECONDS:
                    os.unlink(self._directory / name)
                elif name.startswith("machine-") and (machine := _machine(self._read(name))):
                    machines[machine.name] = machine
        # The number of a plan that cannot be read is taken, too.
        return machines, _plan(self._read(f"plan-{last}")) or Plan(last)

    def _read(self, name: str) -> str | None:
        with contextlib.suppress(FileNotFoundError), open(self._directory / name, "rb") as file:
            return verified(file.read(_LONGEST))
        return None

    def close(self) -> None:
        """Does nothing."""


class ServedBoard:
    """A board that the launcher on the machine of ``address`` serves to all others."""

    def __init__(self, address: str):
        self._address = address
        self._server = _serve(address)

    def exchange(
        self, mine: Machine, proposed: Plan | None = None
    ) -> tuple[dict[str, Machine], Plan]:
        """As of `DirectoryBoard`.

        Raises:
            OSError: nobody serves at the address, or somebody who does not know the secret.
        """
        asked = sign(json.dumps([_text(mine), _text(proposed) if proposed else ""]))
        with socket.create_connection(addresses.split(self._address), _SECONDS) as connection:
            connection.sendall(asked + b"\n")
            said = verified(_read_line(connection))
        if said is None:
            raise OSError(f"what answers is of another job, or has another {VARIABLE}")
        machines, plan = json.loads(said)
        known = {machine.name: machine for text in machines if (machine := _machine(text))}
        return known, _plan(plan) or Plan()

    def reached_from(self) -> str:
        """The address of this machine from which it reaches that of the board.

        Raises:
            UsageError: there is none.
        """
        named, port = addresses.split(self._address)
        try:
            found = socket.getaddrinfo(named, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], found[1]) as way:
                way.connect(found[4])
                host = way.getsockname()[0]
        except OSError as error:
            raise UsageError(
                f"--rendezvous: {named} is not found: {error.strerror or error}; give a name or an "
                "address by which this machine reaches the first"
            ) from error
        if ipaddress.ip_address(host).is_loopback:  # the first machine may know its name by that
            host = named
        return f"[{host}]" if ":" in host else host

    def close(self) -> None:
        """Ends the service, if it is of this process, when others have seen what is there."""
        if self._server:
            deadline = time.monotonic() + _LINGER_SECONDS
            while time.monotonic() < min(deadline, self._server.asked + _QUIET_SECONDS):
                time.sleep(0.05)
            self._server.shutdown()
            self._server.server_close()


class _Service(socketserver.ThreadingTCPServer):
    """Keeps what launchers have said."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket):
        super().__init__(("", 0), _Exchange, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.machines: dict[str, tuple[int, str]] = {}  # beat and record, the latest ones last
        self.plan = Plan()
        self.asked = 0.0  # when a launcher has asked last, by `time.monotonic`
        self.lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def verify_request(self, *_: object) -> bool:
        """Whether there is room for one more connection."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, *arguments: Any) -> None:
        """Answers one connection."""
        try:
            super().process_request_thread(*arguments)
        finally:
            self._free.release()

    def handle_error(self, *_: object) -> None:
        """Strangers that are slow, and launchers that have gone, are no errors."""


class _Exchange(socketserver.BaseRequestHandler):
    server: _Service

    def handle(self) -> None:
        said = verified(_read_line(self.request))
        if said is None:
            return
        record, proposed = json.loads(said)
        machine, plan, board = _machine(record), _plan(proposed), self.server
        with board.lock:
            board.asked = time.monotonic()
            if machine and machine.beat > board.machines.get(machine.name, (-1, ""))[0]:
                board.machines.pop(machine.name, None)
                board.machines[machine.name] = machine.beat, record
                if len(board.machines) > _MOST_MACHINES:  # forget who was heard of longest ago
                    del board.machines[next(iter(board.machines))]
            if plan and plan.number == board.plan.number + 1:
                board.plan = plan
            records = [record for _, record in board.machines.values()]
            answer = json.dumps([records, _text(board.plan)])
        self.request.sendall(sign(answer) + b"\n")


def _read_line(connection: socket.socket) -> bytes:
    """Reads a line within `_SECONDS`, and returns it without its end."""
    line, deadline = b"", time.monotonic() + _SECONDS
    while not line.endswith(b"\n") and len(line) < _LONGEST:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(1 << 16)
        if not data:
            break
        line += data
    return line.removesuffix(b"\n")


def _serve(address: str) -> _Service | None:
    """Serves at ``address`` if its host is this machine and no other launcher serves there."""
    host, port = addresses.split(address)
    try:
        family, kind, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as mine:
            mine.bind((found[0], 0))
        listener = addresses.bound(address, socket.SOCK_STREAM)
        listener.listen(_MOST_CONNECTIONS)
    except OSError:
        return None
    service = _Service(listener)
    threading.Thread(target=service.serve_forever, name="rendezvous", daemon=True).start()
    return service
