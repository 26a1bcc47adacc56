"""Runs what loads TensorFlow as a program of its own, which may crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

_QUIET_SECONDS = 10.0  # until a line of progress, and between such lines


class Failed(Exception):
    """The program has no answer; the message says why."""


def say(text: str) -> None:
    """Shows what the doctor is doing, on standard error."""
    print(f"doctor: {text}", file=sys.stderr, flush=True)


def answer_of(
    module: str, *arguments: str, doing: str, seconds: float, **environ: str
) -> dict[str, Any]:
    """Runs ``python -m module`` for at most ``seconds``, and returns the JSON object in its last
    line.

    Raises:
        Failed: it took longer, crashed, or failed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        # TensorFlow would take all memory of a GPU, which others may use.
        env={**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    began = time.monotonic()
    try:
        while True:
            left = began + seconds - time.monotonic()
            try:
                output, errors = process.communicate(timeout=max(0.0, min(left, _QUIET_SECONDS)))
                break
            except subprocess.TimeoutExpired:
                if left <= _QUIET_SECONDS:
                    raise Failed(f"no answer after {seconds:.0f} s") from None
                taken = time.monotonic() - began
                say(f"{doing} has taken {taken:.0f} s, of at most {seconds:.0f} s")
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise Failed(_reason(process.returncode, errors))
    return json.loads(output.splitlines()[-1])


def _reason(code: int, errors: str) -> str:
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1][:250] if lines else f"exited with {code}"
