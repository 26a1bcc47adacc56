"""The trace: what Perfetto needs of each event, slices that nest, arrows that end in slices."""

from __future__ import annotations

import collections
import dataclasses
import json

import numpy as np
import pytest
import simulated

from ctl.inspect.measure.timeline import join
from ctl.inspect.show.trace import make_trace


def slices(trace: dict) -> dict[tuple[int, int], list[dict]]:
    found = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def overlapping(seed: int = 0):
    """Two replicas of one worker whose packs do not wait for each other."""
    (window,) = simulated.windows(1, replicas=2, packs=4, seed=seed)
    stamps, names = window.stamps.copy(), list(window.names)
    for pack in range(4):  # all done at the same time
        stamps[:, :, names.index(f"done{pack}")] = stamps[:, :, names.index("done3")]
    return join([dataclasses.replace(window, stamps=stamps, in_order=False)])


def profiled():
    return simulated.profiled(simulated.timeline(2, packs=2, noise=0.0))


@pytest.mark.parametrize(
    "timeline",
    [
        simulated.timeline(2, packs=3, late=(1, "input", 0.02)),
        simulated.timeline(2, replicas=3, late=(0, "backward", 0.01)),
        simulated.timeline(1, packs=0),
        overlapping(),
        profiled(),
    ],
    ids=["workers", "replicas", "no packs", "overlapping packs", "profiled"],
)
def test_events_are_what_the_format_says(timeline):
    trace = json.loads(json.dumps(make_trace(timeline), allow_nan=False))
    events = trace["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["cat"]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(slices(trace))
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"worker {worker}" for worker in range(timeline.workers)]
    for thread in slices(trace).values():  # those of one thread nest or are apart
        open_until: list[float] = []
        for event in thread:
            end = round(event["ts"] + event["dur"], 3)
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_phases_have_the_length_of_the_timeline():
    timeline = simulated.timeline(2, late=(1, "forward", 0.02))
    for name in ("input", "backward", "transfer"):
        events = [e for e in make_trace(timeline)["traceEvents"] if e.get("cat") == name]
        total = sum(event["dur"] for event in events) / 1e6
        expected = timeline.phases[name].sum()
        if name == "transfer":
            expected = sum(pack.transfer.sum() for pack in timeline.packs)
        np.testing.assert_allclose(total, expected, rtol=1e-3)


def test_packing_is_around_the_collective():
    found = collections.Counter()
    for event in make_trace(profiled())["traceEvents"]:
        if event.get("cat") in ("pack", "transfer"):
            found[event["name"]] += event["dur"] / 2 / 20  # rows and steps
    assert found["pack0 packing"] == pytest.approx(1500, rel=0.01)
    assert found["pack0"] == pytest.approx(3000 - 1500, rel=0.02)


def test_arrows_go_from_the_last_to_those_that_waited():
    timeline = simulated.timeline(4, packs=1, late=(2, "input", 0.02))
    trace = make_trace(timeline)
    arrows = collections.defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    assert len(arrows) == 3 * len(timeline.steps)
    for arrow in arrows.values():
        start, finish = arrow["s"], arrow["f"]
        assert start["pid"] == 2 + 1 and finish["pid"] != start["pid"] and finish["bp"] == "e"
        assert start["ts"] <= finish["ts"] + 1
        for end in (start, finish):
            thread = slices(trace)[end["pid"], end["tid"]]
            (at,) = [e for e in thread if e["ts"] <= end["ts"] < round(e["ts"] + e["dur"], 3)]
            assert at["cat"] == "transfer"
