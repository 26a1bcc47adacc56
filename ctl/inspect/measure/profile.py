"""Reads a trace of TensorFlow's profiler: the only place that finds the collectives in it.

Marks say when a pack's gradients were there and when its sums were. A trace says, too, when in
between the collective itself ran; the rest is packing, queueing and unpacking.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ctl import private
from ctl.inspect.measure.window import Window

_COLLECTIVE = re.compile(
    r"ctl_all_reduce/pack(\d+)/CollectiveReduceV2(?:_(\d+))?:CollectiveReduceV2"
)
# On the same thread inside of a collective's event: its work is done and what waits for it is told.
# What that starts is still in the event.
_DONE = "CollectiveExecutor::ExecuteAsync::Done"


@contextlib.contextmanager
def profiled() -> Iterator[list[Any]]:
    """Profiles what runs inside; the list has the trace afterwards (an ``XSpace``), or nothing and
    the log says why."""
    traces: list[Any] = []
    reason = private.no_profile()
    if reason:
        logging.warning("%s", reason)
        yield traces
        return
    with tempfile.TemporaryDirectory(prefix="ctl-profile-") as directory:
        try:
            tf.profiler.experimental.start(directory)
        except tf.errors.OpError as error:
            logging.warning("no profile, so packing is in the transfer: %s", error.message)
            yield traces
            return
        try:
            yield traces
        finally:
            tf.profiler.experimental.stop()
        traces += [
            private.parse_xspace(path.read_bytes())
            for path in sorted(Path(directory).rglob("*.xplane.pb"))
        ]


def collectives(space: Any) -> dict[tuple[int, int], np.ndarray]:
    """``{(pack, replica of this worker): float64 [n, 2]}``: when each began and ended, seconds
    since the epoch, in their order. Empty where nothing was reduced by collectives."""
    began = profile_began(space)
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for plane in space.planes:
        names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
        for line in plane.lines:
            done = sorted(e.offset_ps for e in line.events if names[e.metadata_id] == _DONE)
            for event in line.events:
                match = _COLLECTIVE.search(names[event.metadata_id])
                if not match:
                    continue
                end = event.offset_ps + event.duration_ps
                inside = [ps for ps in done if event.offset_ps <= ps <= end]
                origin = began + line.timestamp_ns * 1e-9
                times = origin + event.offset_ps * 1e-12, origin + (inside or [end])[-1] * 1e-12
                found.setdefault((int(match[1]), int(match[2] or 0)), []).append(times)
    return {key: np.array(sorted(times)) for key, times in found.items()}


def profile_began(space: Any) -> float:
    """When the profile began, seconds since the epoch."""
    for plane in space.planes:
        names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
        for stat in plane.stats:
            if names.get(stat.metadata_id) == "profile_start_time":
                return (stat.int64_value or stat.uint64_value) * 1e-9
    return float("nan")


def with_collectives(window: Window, traces: list[Any]) -> Window:
    """``window`` with marks ``begun{k}`` and ``ended{k}`` around the collective of each pack; as it
    is where the trace has none of them, e.g. because replicas share memory and use none."""
    found: dict[tuple[int, int], np.ndarray] = {}
    for trace in traces:
        found |= collectives(trace)
    if not found:
        if traces:
            logging.info("no collectives in the profile: a pack's time is not split further")
        return window
    names, columns = list(window.names), [window.stamps]
    for pack in range(len(window.packs)):
        around = np.full([*window.stamps.shape[:2], 2], np.nan)
        for replica, done in enumerate(window.stamps[:, :, names.index(f"done{pack}")]):
            times = found.get((pack, replica), np.zeros([0, 2]))
            # It belongs to the first step whose sums were there after it ended.
            step = np.searchsorted(done, times[:, 1])
            inside = (step < len(done)) & (times[:, 1] > done[0])
            around[replica, step[inside]] = times[inside]
        names += [f"begun{pack}", f"ended{pack}"]
        columns.append(around)
    return dataclasses.replace(window, names=tuple(names), stamps=np.concatenate(columns, axis=2))
