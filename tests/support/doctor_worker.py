"""A worker that runs the doctor with faults: its machine is another than that of its peers.

    doctor_worker OUT [--FLAG…] [FAULT=VALUE…]

Each fault is of worker 1, or of a doctor without a job. TensorFlow is not loaded: `probed` stands
for what `ctl.doctor.probe` prints. The mounts are those of a namespace of this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from ctl.doctor import __main__, machine, peers, shared
from ctl.doctor.report import fine

NEWNS, NEWUTS = 0x00020000, 0x04000000

# Both machines are this one: what takes a moment here may take seconds between real ones.
peers._OTHER_WAY_SECONDS, machine._NAME_SECONDS, shared._SEEN_SECONDS = 4.0, 2.0, 1.5


def probed(**more: object) -> machine.Probe:
    versions = {"ctl": "0.1.0", "python": "3.11", "tensorflow": "2.21", "keras": "3.15"}
    return machine.Probe(versions | more, copied=10.0, gflops=100.0)


def unshare(flags: int) -> None:
    assert ctypes.CDLL(None, use_errno=True).unshare(flags) == 0, os.strerror(ctypes.get_errno())
    if flags == NEWNS:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def mount(path: str, options: str) -> None:
    """An empty file system at ``path``, which no other process sees."""
    unshare(NEWNS)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)


def hosts(line: str) -> None:
    """Another /etc/hosts for this process."""
    unshare(NEWNS)
    file = Path(os.environ["HOSTS_FILE"])
    file.write_text(f"{line}\n127.0.0.1 localhost {socket.gethostname()}\n")
    subprocess.run(["mount", "--bind", file, "/etc/hosts"], check=True)


def clock(seconds: str) -> None:
    right = time.time
    time.time = lambda: right() + float(seconds)


def hostname(name: str) -> None:
    unshare(NEWUTS)
    socket.sethostname(name)


FAULTS = {
    "tmpfs": lambda value: mount(*value.split(":")),
    "hosts": hosts,
    "clock": clock,
    "hostname": hostname,
    "secret": lambda value: os.environ.update(CTL_JOB_SECRET=value),
}


def run() -> None:
    out, *arguments = sys.argv[1:]
    os.environ["HOSTS_FILE"] = f"{out}/hosts"
    faults = dict(word.split("=", 1) for word in arguments if not word.startswith("--"))
    config = json.loads(os.environ.get("TF_CONFIG", "null"))
    versions = {}
    if config is None or config["task"]["index"] == 1:
        versions = {name: faults.pop(name) for name in ("keras",) if name in faults}
        for name, value in faults.items():
            FAULTS[name](value)
    machine.check_tensorflow = lambda: (fine("tensorflow", "not asked"), probed(**versions))
    sys.argv = ["doctor", *(word for word in arguments if word.startswith("--"))]
    __main__.run()
