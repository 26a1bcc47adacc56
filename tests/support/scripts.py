"""Runs the scripts of ``benchmarks/``."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import BENCHMARKS


def run(command: str, exit_code: int | None = 0) -> subprocess.CompletedProcess:
    """Runs ``command``, a script and its flags, to its end, which must be ``exit_code``, if any."""
    script, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=900,  # many times what it takes
    )
    assert exit_code in (None, done.returncode), done.stderr
    return done


def run_changed(program: str, *arguments: object) -> subprocess.CompletedProcess:
    """Runs ``program`` to its end: Python that imports a script by name, changes and runs it."""
    program = f"import sys\nsys.path.insert(0, sys.argv.pop(1))\n{program}"
    command = [sys.executable, "-c", program, BENCHMARKS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def results(
    folder: Path, command: str, exit_code: int = 0
) -> tuple[dict[str, Any], subprocess.CompletedProcess]:
    """As `run`, and what it has written with ``--json``."""
    out, (script, _, flags) = folder / "out.json", command.partition(" ")
    done = run(f"{script} --json={out} {flags}", exit_code)
    return json.loads(out.read_text()), done
