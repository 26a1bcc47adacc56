"""Does ctl use the GPUs of this machine rightly, and how fast? One command, one page.

    python benchmarks/gpu.py --page=gpu.html
    python benchmarks/gpu.py --devices=cpu --effort=short    # every line, on a machine without GPUs

Checks (`peers/device_checks.py`): all devices train the weights of one, NCCL sums the gradients,
the profiler sees the all-reduces between the stamps. Then the other benchmarks run as processes,
each with a limit, and their tables come to the page. What fails has its reason there, and the exit
code is 1.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags
from gpu_page import make_page
from processes import Peer, check_names, machine, progress

from ctl.errors import CtlError, UsageError
from ctl.flags.parsing import check_flags, define_path, group, run_command

# Name -> what it answers. All but the first two need something to sum.
CHECKS = {
    "equality": "Do all devices together train what one does?",
    "sparse": "Do rows of an embedding get one update?",
    "plan": "What sums the gradients?",
    "bytes": "Are the bytes those of the gradients?",
    "stamps": "Does the profiler agree with the stamps?",
}
_OF_SUMS = {"plan", "bytes", "stamps"}


@dataclasses.dataclass(frozen=True)
class Table:
    """A benchmark: its question, its command, and the flags that make it short. ``N`` is the number
    of devices."""

    question: str
    command: str
    short: str
    least: int = 1  # devices


_STEP_TIME = "step_time.py --variants=ctl,ctl_off,fit,fit_50,orbit,plain,torch,bound"
_SHORT_STEPS = "--processes=1 --rounds=1 --blocks=1 --warm_up=1 --tolerance=9"
TABLES = {
    "step_time": Table(
        "How long does a step take?",
        f"{_STEP_TIME} --model=dense,convnet --global_batch_size=256",
        f"{_SHORT_STEPS} --steps=50 --model=dense",
    ),
    "resnet20": Table(
        "And one of a deeper network?",
        f"{_STEP_TIME} --model=resnet20 --global_batch_size=256 --steps=100 --tolerance=5",
        f"{_SHORT_STEPS} --steps=3 --global_batch_size=32 --variants=ctl_off,plain",
    ),
    "replicas": Table(
        "How long does it take on all devices?",
        "step_time.py --variants=ctl,fit,orbit,plain,bound --model=dense,convnet --replicas=N "
        "--global_batch_size=BATCH",
        f"{_SHORT_STEPS} --steps=50 --variants=ctl,plain",
        least=2,
    ),
    "all_reduce": Table(
        "How long does an all-reduce take?",
        "all_reduce.py --replicas=N",
        "--max_bytes=65536 --factor=8 --iterations=10 --seconds=0.1 --beside=copy",
        least=2,
    ),
    "scaling": Table(
        "How does training scale?",
        "scaling.py --strategy=mirrored --counts=COUNTS",
        "--rounds=1 --steps=5",
        least=2,
    ),
    "input_pipeline": Table(
        "How many images reach the devices?",
        "input_pipeline.py --replicas=1,N",
        "--rounds=1 --steps=50 --stream_steps=5 --warm_up=1 --pipelines=tutorial,ctl",
    ),
    "checkpoint": Table(
        "How long does a save stop the loop?",
        "checkpoint.py --megabytes=1,100",
        "--megabytes=1 --rounds=2",
    ),
    "model_size": Table(
        "What do more variables cost?",
        "model_size.py --variables=10,100,1000 --replicas=N --long_steps=1000",
        "--variables=10,30 --blocks=1 --steps=3 --long_steps=10",
    ),
    "startup": Table(
        "How long until the first step?",
        "startup.py",
        "--what=python,help,bad_flag --rounds=1",
    ),
    "time_to_accuracy": Table(
        "How long until an accuracy?",
        "time_to_accuracy.py --seeds=3",
        "--seeds=1 --variants=ctl,fit_50 --steps=250",
    ),
}

with group("What is run"):
    _WHAT = flags.DEFINE_list("what", [*CHECKS, *TABLES], "any of these")
    _DEVICES = flags.DEFINE_enum(
        "devices", "auto", ["auto", "gpu", "cpu"], "auto: GPUs if TensorFlow sees any"
    )
    _REPLICAS = flags.DEFINE_integer(
        "replicas", None, "devices; by default all GPUs, or 2 logical CPUs", lower_bound=1
    )
    _EFFORT = flags.DEFINE_enum("effort", "full", ["full", "short"], "short: to see that it runs")
    _LIMIT = flags.DEFINE_float("limit", 1800.0, "seconds for one line", lower_bound=1)
with group("Results"):
    define_path("page", None, "file for the page, HTML")
    define_path("json", None, "file for the results")


def _check(what: Sequence[str]) -> None:
    check_names("unknown --what", what, [*CHECKS, *TABLES])


check_flags(["what"], _check)


def visible_gpus() -> list[str]:
    """Names of the GPUs, as another process sees them: this one shall not hold them."""
    code = (
        "import tensorflow as tf; print(*(d.name for d in tf.config.list_physical_devices('GPU')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise CtlError(f"TensorFlow: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.split()


def table_command(table: Table, devices: int) -> list[str]:
    """The script of ``table`` and its flags on so many devices."""
    counts = [n for n in (1, 2, 4, 8, 16) if n < devices] + [devices]
    words = table.command.replace("BATCH", str(64 * devices)).split()
    if _EFFORT.value == "short":
        words += table.short.split()
    filled = {"1,N": "1" if devices == 1 else f"1,{devices}", "N": str(devices)}
    filled["COUNTS"] = ",".join(map(str, counts))

    def fill(word: str) -> str:
        name, equals, value = word.partition("=")
        return f"{name}{equals}{filled.get(value, value)}"

    return [fill(word) for word in words]


def not_run(question: str, least: int, devices: int) -> dict[str, Any]:
    """The row of what needs more devices."""
    said = f"needs {least} devices, but found {devices}"
    return {"question": question, "ok": None, "found": [said]}


def run_table(name: str, devices: int, environment: dict[str, str]) -> dict[str, Any]:
    """Runs a benchmark; ``ok`` says whether it ended with 0."""
    table = TABLES[name]
    if devices < table.least:
        return not_run(table.question, table.least, devices)
    script, *arguments = table_command(table, devices)
    row: dict[str, Any] = {"question": table.question, "command": " ".join([script, *arguments])}
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, pathlib.Path(__file__).with_name(script), *arguments],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT.value,
        )
    except subprocess.TimeoutExpired:
        return row | {"ok": False, "found": [f"did not end in {_LIMIT.value:g} s; see --limit"]}
    row |= {"ok": done.returncode == 0, "seconds": time.perf_counter() - begin}
    errors = done.stderr.strip().splitlines()
    found = [] if row["ok"] else [errors[-1] if errors else f"exit code {done.returncode}"]
    return row | {"found": found, "output": done.stdout.strip()}


def run_checks(
    names: Sequence[str], devices: int, environment: dict[str, str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Runs the checks in a process, and in another one after an error. Returns what the process
    says of its devices, and a row for each check."""
    about: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    peer = None
    for name in names:
        progress(f"check: {name}")
        if devices == 1 and name in _OF_SUMS:
            rows[name] = not_run(CHECKS[name], 2, devices)
            continue
        rows[name] = {"question": CHECKS[name]}
        begin = time.perf_counter()
        try:
            if peer is None:
                script = ["device_checks.py", f"--replicas={devices}"]
                peer = Peer("device_checks.py", script, environment)
                about = peer.answer(_LIMIT.value)
            rows[name] |= peer.ask(_LIMIT.value, check=name)
        except CtlError as error:
            rows[name] |= {"ok": False, "found": [str(error)]}
            if peer:
                peer.close()
            peer = None
        rows[name]["seconds"] = time.perf_counter() - begin
    if peer:
        peer.close()
    progress("")
    return about, rows


def main() -> None:
    gpus = [] if _DEVICES.value == "cpu" else visible_gpus()
    if _DEVICES.value == "gpu" and not gpus:
        raise UsageError("--devices=gpu: TensorFlow sees no GPU; --devices=cpu runs every line")
    devices = _REPLICAS.value or len(gpus) or 2
    if gpus and devices > len(gpus):
        raise UsageError(f"--replicas={devices}, but TensorFlow sees {len(gpus)} GPUs")
    # Also the peers that do not ask TensorFlow shall leave the GPUs of this machine alone.
    environment = {} if gpus else {"CUDA_VISIBLE_DEVICES": "-1"}
    note = "" if gpus else "No GPU was used: these are logical devices of one CPU. "
    if _EFFORT.value == "short":
        note += "The runs are short, to see that each line runs: their times mean nothing."
    about: dict[str, Any] = {"machine": machine(os.getloadavg()[0]), "note": note.strip()}
    names = [name for name in CHECKS if name in _WHAT.value]
    seen, rows = run_checks(names, devices, environment)
    kind = ", ".join(sorted(set(seen.get("names", [])))) or ("GPU" if gpus else "logical CPU")
    about |= seen | {"devices": f"{devices} {kind} device{'' if devices == 1 else 's'}"}
    print(about["devices"], *(f"{key}={value}" for key, value in about["machine"].items()))
    if note:
        print(note)
    for name in rows:
        _say(name, rows[name])
    for name in TABLES:
        if name in _WHAT.value:
            progress(f"table: {name}")
            rows[name] = run_table(name, devices, environment)
            progress("")
            _say(name, rows[name])
        _write(about, rows)
    if failed := [name for name, row in rows.items() if row["ok"] is False]:
        raise CtlError(f"failed: {', '.join(failed)}")


def _say(name: str, row: dict[str, Any]) -> None:
    result = {True: "passed", False: "failed", None: "not run"}[row["ok"]]
    print(
        f"{name:18}{result:9}{row.get('seconds', 0):6.0f} s  {'; '.join(row['found'])}", flush=True
    )


def _write(about: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    for path, content in (
        (flags.FLAGS.page, make_page(about, rows)),
        (flags.FLAGS.json, json.dumps({"about": about, "rows": rows}, indent=1)),
    ):
        if path:
            pathlib.Path(path).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    run_command(main, __doc__)
