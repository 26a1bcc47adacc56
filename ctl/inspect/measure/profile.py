"""Finds the collectives in a trace of TensorFlow's profiler.

Marks say when the gradients of a pack and when its sums were ready. A trace also says when the
collective itself ran in between; the rest is packing, queueing and unpacking.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base import tf_internals
from ctl.inspect.measure.window import Window

_COLLECTIVE = re.compile(
    r"ctl_all_reduce/pack(\d+)/CollectiveReduceV2(?:_(\d+))?:CollectiveReduceV2"
)
# An event inside the event of a collective, on the same thread: the collective is done and calls
# back. The event of the collective ends later, after the operations that the callback starts.
_DONE = "CollectiveExecutor::ExecuteAsync::Done"


@contextlib.contextmanager
def profiled(wanted: bool = True) -> Iterator[list[Any]]:
    """Profiles what runs inside the block, if ``wanted``.

    Yields:
        A list, filled at the end of the block with the traces (``XSpace``). If there is no profile,
        the list stays empty and the log says why.
    """
    traces: list[Any] = []
    if not wanted:
        yield traces
        return
    reason = tf_internals.no_profile()
    if reason:
        logging.warning("%s", reason)
        yield traces
        return
    with tempfile.TemporaryDirectory(prefix="ctl-profile-") as directory:
        try:
            tf.profiler.experimental.start(directory)
        except tf.errors.OpError as error:
            logging.warning("no profile, so the transfer includes packing: %s", error.message)
            yield traces
            return
        try:
            yield traces
        finally:
            tf.profiler.experimental.stop()
        traces += [
            tf_internals.parse_xspace(path.read_bytes())
            for path in sorted(Path(directory).rglob("*.xplane.pb"))
        ]


def collectives(space: Any) -> dict[tuple[int, int], np.ndarray]:
    """When the collectives in a trace, an ``XSpace``, began and ended: ``{(pack, replica of this
    worker): float64 [n, 2]}``, seconds since the epoch, ascending. Empty if the step uses no
    collectives."""
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
    """When the profile began, seconds since the epoch; NaN if the trace does not say."""
    for plane in space.planes:
        names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
        for stat in plane.stats:
            if names.get(stat.metadata_id) == "profile_start_time":
                return (stat.int64_value or stat.uint64_value) * 1e-9
    return float("nan")


def with_collectives(window: Window, traces: Sequence[Any]) -> Window:
    """``window`` with the marks ``begun{k}`` and ``ended{k}`` around the collective of each pack k.

    Without collectives in ``traces`` it is returned unchanged: replicas that share memory use none.
    """
    found: dict[tuple[int, int], np.ndarray] = {}
    for trace in traces:
        found |= collectives(trace)
    if not found:
        if traces:
            logging.info(
                "the profile has no collectives, so the time of a pack is not split further"
            )
        return window
    names, columns = list(window.names), [window.stamps]
    for pack in range(len(window.packs)):
        around = np.full([*window.stamps.shape[:2], 2], np.nan)
        for replica, done in enumerate(window.stamps[:, :, names.index(f"done{pack}")]):
            times = found.get((pack, replica), np.zeros([0, 2]))
            # A collective belongs to the first step whose sums were ready after it ended.
            step = np.searchsorted(done, times[:, 1])
            inside = (step < len(done)) & (times[:, 1] > done[0])
            around[replica, step[inside]] = times[inside]
        names += [f"begun{pack}", f"ended{pack}"]
        columns.append(around)
    return dataclasses.replace(window, names=tuple(names), stamps=np.concatenate(columns, axis=2))
