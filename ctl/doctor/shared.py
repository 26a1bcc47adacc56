"""Whether all workers see one model_dir: each reads what the others write there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctl.base import durable
from ctl.doctor.peers import Peers
from ctl.doctor.program import say
from ctl.doctor.storage import lines, replacing

_SEEN_SECONDS = 5.0  # a file system of a network may show a new file late
_STAGE_SECONDS = 30.0  # for the slowest worker


def see(peers: Peers, model_dir: str | None) -> dict[str, Any]:
    """Writes to the model_dir and looks for what the others wrote. All doctors call it at once.

    Returns:
        The fields ``writes``, ``shares``, ``reads`` and ``torn`` of a `ctl.doctor.report.Report`.
    """
    directory = Path(model_dir) if model_dir and "://" not in model_dir else None
    new = directory is not None and not directory.exists()
    me, others = peers.cluster.index, peers.others
    # A name of scratch: `durable.sweep` deletes it if the doctors are killed.
    folder = directory and directory / f"tmp-doctor-0-{peers.cluster.fingerprint[:8]}"
    token = ""
    if folder:
        say("checks whether all workers see one --model_dir")
        with contextlib.suppress(OSError):  # `check_model_dir` tells
            folder.mkdir(parents=True, exist_ok=True)
            durable.write_text(folder / f"turns-{me}", lines(0), via=folder)
            token = secrets.token_hex(8)
            durable.write_text(folder / f"token-{me}", token, via=folder)
    tokens = peers.exchange("token", token, _STAGE_SECONDS)
    found: dict[str, Any] = {"writes": bool(token), "shares": {}, "reads": 0, "torn": 0}
    if folder and token:
        found["shares"] = _seen(folder, {i: tokens[i] for i in others if tokens.get(i)})
    peers.exchange("seen", None, _STAGE_SECONDS)
    if folder and token:
        seen = [folder / f"turns-{i}" for i, sees in found["shares"].items() if sees]
        with contextlib.suppress(OSError):
            found["reads"], found["torn"] = replacing(folder / f"turns-{me}", seen)
    peers.exchange("replaced", None, _STAGE_SECONDS)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    if directory and new:
        with contextlib.suppress(OSError):  # others may use it already
            directory.rmdir()
    return found


def _seen(folder: Path, tokens: Mapping[int, str]) -> dict[int, bool]:
    """For each worker, whether its token is in its file in ``folder``; waits up to 5 s for all."""
    deadline = time.monotonic() + _SEEN_SECONDS
    seen = dict.fromkeys(tokens, False)
    while not all(seen.values()) and time.monotonic() < deadline:
        for worker, token in tokens.items():
            with contextlib.suppress(OSError):
                os.listdir(folder)  # an NFS asks its server again
                seen[worker] = (folder / f"token-{worker}").read_text("utf-8") == token
        time.sleep(0.05)
    return seen
