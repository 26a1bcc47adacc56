"""Runs the scripts of ``benchmarks/``."""

from __future__ import annotations

import subprocess
import sys

from paths import BENCHMARKS


def run(script: str, *arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess:
    """Runs a benchmark to its end, which must be ``exit_code``."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == exit_code, done.stderr
    return done
