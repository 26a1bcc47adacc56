"""What `long_run.py` sees of a process and of its folder, and whether it grows."""

from __future__ import annotations

import os
import pathlib
import re
import statistics
from collections.abc import Sequence
from typing import Any

from ctl.errors import CtlError


def memory(pid: int) -> dict[str, int]:
    """Bytes of the resident memory, and of its part that is no file; threads and open files."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    values = {name: int(n) for name, n in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}
    return {
        "resident": values["VmRSS"] << 10,
        "anonymous": values["RssAnon"] << 10,
        "threads": values["Threads"],
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def sizes(directory: pathlib.Path) -> dict[str, int]:
    """Bytes below ``directory`` by path. A number in a path is ``#``, so that a checkpoint that
    takes the place of another has its name."""
    found: dict[str, int] = {}
    for path in directory.rglob("*"):
        name = re.sub(r"\d+", "#", str(path.relative_to(directory)))
        try:
            if path.is_file():
                found[name] = found.get(name, 0) + path.stat().st_size
        except OSError:  # it was replaced meanwhile
            continue
    return found


def tenths(samples: Sequence[dict[str, Any]], steps: int, key: str) -> tuple[float, float]:
    """The medians of ``key`` in the first and in the last tenth of the steps."""
    first = [s[key] for s in samples if 0 < s["step"] <= steps / 10]
    last = [s[key] for s in samples if s["step"] > steps * 9 / 10]
    if not first or not last:
        raise CtlError("the run is too short: give more --steps")
    return statistics.median(first), statistics.median(last)
