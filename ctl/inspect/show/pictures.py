"""Chooses the steps and replicas of a `Timeline` to draw.

A few replicas are drawn in full. Of many, those that explain the step are drawn: the last to come,
the one that waited longest, and some between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctl.inspect.measure.timeline import covered_seconds
from ctl.inspect.show import charts
from ctl.inspect.show.charts import Bars, Lane, Span, duration
from ctl.inspect.show.report import median, row_names

if TYPE_CHECKING:
    from ctl.inspect.measure.timeline import PackTimes, Timeline

LANES = 8  # the most replicas in the picture of a step
PANELS = 4  # the most replicas in the picture of waits
CELLS = 64  # the most rows of the heat map
PACKS = 200  # the most packs of a lane


def typical_and_worst(timeline: Timeline) -> list[tuple[str, int]]:
    """Names and indices of two steps, or of one if they are the same.

    The phases of the typical step are nearest to their medians; the worst step is the longest.
    """
    phases = np.nan_to_num(np.stack([*timeline.phases.values(), timeline.late]))
    unlike = np.abs(phases - np.median(phases, axis=2, keepdims=True)).sum(axis=(0, 1))
    typical = int(unlike.argmin())
    worst = int(np.nan_to_num(timeline.step_seconds.max(axis=0)).argmax())
    return [("typical", typical)] + ([("worst", worst)] if worst != typical else [])


def choose(
    late: np.ndarray, wait: np.ndarray, most: int, least: float
) -> tuple[list[int], dict[int, str]]:
    """Chooses at most ``most`` rows.

    Args:
        late: [N], seconds: how late each row came to the packs.
        wait: [N], seconds: how long each row waited in them.
        most: the number of rows to choose, 2 or more.
        least: seconds; a row gets a note only above.

    Returns:
        The rows, ascending; and row -> note, for some of them.
    """
    late, wait = np.nan_to_num(late), np.nan_to_num(wait)
    notes = {}
    if len(late) > 1 and wait.max() > least:
        notes[int(wait.argmax())] = "waits longest"
    if len(late) > 1 and late.max() > least:
        notes[int(late.argmax())] = "comes last"
    if len(late) <= most:
        return list(range(len(late))), notes
    chosen = dict.fromkeys(notes)
    by_wait = np.argsort(wait, kind="stable")
    for position in np.linspace(0, len(late) - 1, most):  # the spread, from short to long waits
        if len(chosen) < most:
            chosen[int(by_wait[round(position)])] = None
    return sorted(chosen), notes


def noise(timeline: Timeline) -> float:
    """Seconds of lateness that are noise: 1 % of the median step, or the error of the clocks."""
    least = 0.01 * float(np.nan_to_num(median(timeline.step_seconds)))
    return max(least, timeline.clock_error)


def step_picture(timeline: Timeline, index: int, name: str, limit: float) -> tuple[str, int]:
    """Draws one step.

    Args:
        timeline: what was measured.
        index: of the step, in the timeline.
        name: a description for screen readers.
        limit: seconds at the right end.

    Returns:
        The SVG, and the number of replicas in it.
    """
    wait = _waited(timeline)[:, index]
    packs = min(len(timeline.packs), PACKS)
    most = min(LANES, max(2, 240 // (packs + 4)))  # bounds the file for any number of packs
    rows, notes = choose(timeline.late[:, index], wait, most, noise(timeline))
    names = row_names(timeline.rows)
    lanes = [_lane(timeline, row, index, names[row], notes.get(row, "")) for row in rows]
    return charts.draw_step(lanes, limit, name), len(lanes)


def length(timeline: Timeline, index: int) -> float:
    """Seconds from the first beginning to the last end of a step, over all rows."""
    begin = timeline.begin[:, index]
    return float((begin + timeline.step_seconds[:, index]).max() - begin.min())


def _lane(timeline: Timeline, row: int, index: int, label: str, note: str) -> Lane:
    zero = timeline.begin[:, index].min()
    at = timeline.begin[row, index] - zero
    compute = []
    for phase, text, seconds in computed_phases(timeline, row, index):
        compute.append(_phase(phase, at, at + seconds, label, text))
        at += seconds
    computed, end = at, timeline.begin[row, index] - zero + timeline.step_seconds[row, index]
    apply = timeline.phases["apply"][row, index]
    compute.append(_phase("apply", end - apply, end, label, "apply"))
    communication, ready, exposed = [], [], []
    covered = computed
    packs = timeline.packs[:PACKS]
    for pack, level in zip(packs, levels(packs, row, index), strict=True):
        parts = pack_parts(pack, row, index)
        title = f"{label}: {pack.name}, {pack.bytes:,} bytes"
        title += "".join(f", {name} {duration(end - begin)}" for name, begin, end in parts)
        for name, begin, end in parts:
            text = {"wait": f"wait {duration(end - begin)}", "transfer": pack.name}.get(name, "")
            communication.append(Span(name, begin - zero, end - zero, text, title, level))
        ready.append(pack.ready[row, index] - zero)
        start, done = parts[0][1] - zero, parts[-1][2] - zero
        if done > covered:
            exposed.append((max(start, covered), done))
            covered = done
    return Lane(label, note, tuple(compute), tuple(communication), tuple(ready), tuple(exposed))


def pack_parts(pack: PackTimes, row: int, index: int) -> list[tuple[str, float, float]]:
    """The parts of an all-reduce on a replica in one step, in order and without gaps.

    Returns:
        Name, begin and end, seconds since `Timeline.origin`. The names are "wait", "transfer" and,
        with a profile, "pack" for packing and unpacking.
    """
    start, begun = float(pack.start[row, index]), float(pack.begun[row, index])
    there = begun + float(pack.wait[row, index])
    ended = there + float(pack.transfer[row, index])
    after = np.nan_to_num(pack.packing[row, index]) - (begun - start)
    parts = [("wait", begun, there), ("transfer", there, ended)]
    if begun > start:
        parts.insert(0, ("pack", start, begun))
    if after > 0:
        parts.append(("pack", ended, ended + float(after)))
    return parts


def levels(packs: Sequence[PackTimes], row: int, index: int) -> list[int]:
    """For each pack, the level at which it overlaps no other; 0 for packs that run in turn."""
    free_at: list[float] = []  # for each level, the end of its last pack
    found = []
    for pack in packs:
        parts = pack_parts(pack, row, index)
        start, done = parts[0][1], parts[-1][2]
        rounding = start + 1e-6
        level = next((i for i, free in enumerate(free_at) if free <= rounding), len(free_at))
        free_at[level : level + 1] = [done]
        found.append(level)
    return found


def computed_phases(timeline: Timeline, row: int, index: int) -> list[tuple[str, str, float]]:
    """The phases that a replica computed up to its last gradients: phase, text to show, seconds."""
    found = []
    for phase in ("input", "forward", "backward"):
        seconds = float(timeline.phases[phase][row, index])
        joint = phase == "backward" and not np.isfinite(timeline.phases["forward"][row, index])
        if np.isfinite(seconds):
            found.append((phase, "forward and backward" if joint else phase, seconds))
    return found


def _phase(phase: str, begin: float, end: float, label: str, text: str) -> Span:
    return Span(phase, begin, end, text, f"{label}: {text}, {duration(end - begin)}")


def waits_picture(timeline: Timeline) -> tuple[str, int]:
    """Draws wait and transfer of every step; returns the SVG and the number of replicas in it."""
    total = timeline.hidden + timeline.exposed  # not the sum over packs, which may overlap
    wait = np.minimum(_waited(timeline), total)  # they may differ by rounding
    transfer = total - wait
    late = median(timeline.late, axis=1)
    rows, notes = choose(late, median(wait, axis=1), PANELS, noise(timeline))
    names = row_names(timeline.rows)
    bars = [
        Bars(names[row], notes.get(row, ""), wait[row], transfer[row], timeline.exposed[row])
        for row in rows
    ]
    name = "Wait and transfer of each step"
    return charts.draw_bars(bars, timeline.steps.tolist(), name), len(bars)


def _waited(timeline: Timeline) -> np.ndarray:
    """[N, S], seconds in which a row waited in any pack; packs may overlap."""
    spans = [(pack.begun, pack.begun + pack.wait) for pack in timeline.packs]
    return np.zeros(timeline.late.shape) + covered_seconds(spans)


def lateness_picture(timeline: Timeline) -> tuple[str, int]:
    """Draws the heat map of lateness of all replicas, or of the latest if there are too many.

    Returns:
        The SVG, and the number of replicas in it.
    """
    late = np.nan_to_num(timeline.late)
    shown: Sequence[int] = range(len(late))
    if len(late) > CELLS:
        shown = sorted(np.argsort(-late.mean(axis=1), kind="stable")[:CELLS].tolist())
    last = np.bincount(late.argmax(axis=0)[late.max(axis=0) > 0], minlength=len(late))
    names = row_names(timeline.rows)
    picture = charts.draw_lateness(
        [names[row] for row in shown],
        [f"{last[row]} of {late.shape[1]}" if last[row] else "" for row in shown],
        timeline.late[list(shown)].tolist(),
        timeline.steps.tolist(),
        float(median(timeline.step_seconds)),
        "How late each replica came to the all-reduces of each step",
    )
    return picture, len(shown)
