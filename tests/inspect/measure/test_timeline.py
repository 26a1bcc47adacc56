"""Windows of all workers joined: phases, packs, clocks, blame and verdict, against simulated truth;
and files that are not what they should be."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import simulated

from ctl.errors import UsageError
from ctl.inspect.measure import window
from ctl.inspect.measure.late_worker import _rhythm, accused, late_worker
from ctl.inspect.measure.link import Measured, Point
from ctl.inspect.measure.timeline import DRIFT, PHASES, covered_seconds, join
from ctl.inspect.measure.verdict import share_of_measured, verdict
from ctl.inspect.show import pictures


def assert_phases_add_up(timeline) -> None:
    together = sum(np.nan_to_num(seconds) for seconds in timeline.phases.values())
    np.testing.assert_allclose(together, timeline.step_seconds, atol=1e-9)


def medians(timeline) -> dict[str, np.ndarray]:
    return {name: np.median(seconds, axis=1) for name, seconds in timeline.phases.items()}


@pytest.mark.parametrize(("workers", "replicas", "packs"), [(1, 1, 1), (2, 1, 4), (3, 2, 2)])
def test_phases_add_up_and_are_those_that_were_simulated(workers, replicas, packs):
    timeline = simulated.timeline(workers, replicas, packs=packs, noise=0.01)
    assert len(timeline.rows) == workers * replicas
    assert tuple(timeline.phases) == PHASES
    assert_phases_add_up(timeline)
    found = medians(timeline)
    for name, seconds in simulated.PHASES.items():
        np.testing.assert_allclose(found[name], seconds, rtol=0.02)
    total = np.median(timeline.hidden + timeline.exposed, axis=1)
    waited = sum(np.median(pack.wait, axis=1) for pack in timeline.packs)
    np.testing.assert_allclose(total, packs * simulated.TRANSFER + waited, rtol=0.05)
    # All but the end of the last pack is behind the backward pass, where there are several.
    if packs == 4:
        assert (np.median(timeline.hidden, axis=1) > 1.5 * simulated.TRANSFER).all()
    else:
        assert (timeline.hidden >= 0).all()
    assert len(timeline.packs) == packs
    for pack in timeline.packs:
        np.testing.assert_allclose(np.median(pack.seconds), simulated.TRANSFER, rtol=0.03)
        assert pack.busbw == pytest.approx(pack.algbw * 2 * (1 - 1 / len(timeline.rows)))
        assert pack.algbw == pytest.approx(pack.bytes / np.median(pack.seconds) / 1e9)


@pytest.mark.parametrize("barriers", [200, 0])
def test_clocks_are_within_their_bounds(barriers):
    offsets = {1: -0.5, 2: 3.217}
    timeline = simulated.timeline(3, offsets=offsets, barriers=barriers)
    assert [clock.worker for clock in timeline.clocks] == [0, 1, 2]
    for clock in timeline.clocks:
        assert clock.low - 1e-6 <= offsets.get(clock.worker, 0.0) <= clock.high + 1e-6
        assert clock.error < (0.001 if barriers else 0.01)  # packs are a poorer meeting


@pytest.mark.parametrize("age", [0.0, 900.0])
def test_clocks_may_have_drifted_since_they_were_compared(age):
    compared = [dataclasses.replace(w, barriers=w.barriers - age) for w in simulated.windows(3)]
    timeline = join(compared)
    _, *errors = (clock.error for clock in timeline.clocks)
    for error in errors:
        assert DRIFT * age <= error < DRIFT * age + 0.001
    assert timeline.clock_error == pytest.approx(sum(errors))  # in opposite directions
    assert pictures.noise(timeline) >= timeline.clock_error


def test_a_step_that_sums_by_itself_has_all_of_it_after_the_backward_pass():
    timeline = simulated.without_packs()
    assert_phases_add_up(timeline)
    for unknown in (timeline.exposed, timeline.hidden, timeline.late, timeline.phases["apply"]):
        assert np.isnan(unknown).all()
    _, why, _ = verdict(timeline)
    assert "communication is not measured" in why
    longer = simulated.with_phases(timeline, other=10 * timeline.phases["other"])
    first, why, remedy = verdict(longer)
    assert "bound by what follows its backward pass" in first
    assert "communication is not measured" in why and "ctl.inspect plan" in remedy


def test_a_pack_out_of_order_and_marks_that_are_missing():
    (only,) = simulated.windows(1, 2, packs=2)
    stamps = only.stamps.copy()
    stamps[:, :, only.names.index("forward")] = np.nan  # XLA, or micro-batches
    stamps[:, :, only.names.index("ready1")] = np.nan  # reduce() of the user's own
    timeline = join([dataclasses.replace(only, stamps=stamps, in_order=False)])
    assert np.isnan(timeline.phases["forward"]).all()
    np.testing.assert_allclose(medians(timeline)["backward"], 0.012, rtol=0.05)
    assert [pack.name for pack in timeline.packs] == ["pack0"]
    assert_phases_add_up(timeline)


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "apply"])
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (3, 2), (64, 1)])
def test_the_late_worker_and_its_phase_are_named(phase, workers, replicas):
    late = workers - 1
    windows = simulated.windows(
        workers, replicas, late=(late, phase, 0.02), offsets={late: 2.0}, packs=2
    )
    timeline = join(windows)
    named = late_worker(timeline)
    assert (named.worker, named.phase) == (late, phase)
    assert named.steps >= 0.95 * named.of
    assert named.excess == pytest.approx(0.02, abs=0.0015)
    first, why, remedy = verdict(timeline)
    assert f"waits for worker {late}" in first
    assert f"Its {phase} takes" in why
    assert remedy.startswith("Try a faster input" if phase == "input" else "See what else runs")
    # What a worker does between calls of the loop is before its next batch, and after its "apply".
    assert ("callbacks" in remedy) == (phase == "input")


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("packs", [1, 2, 3, 8])
@pytest.mark.parametrize("phase", ["input", "backward"])
def test_one_delay_counts_once_for_any_number_of_packs(phase, packs, in_order):
    planted = {"late": (1, phase, 0.02), "packs": packs, "in_order": in_order}
    timeline = simulated.timeline(3, noise=0.0, **planted)
    np.testing.assert_allclose(timeline.late[1], 0.02, rtol=0.01)
    np.testing.assert_allclose(timeline.late[[0, 2]], 0, atol=1e-3)


def test_two_delays_between_packs_add_up():
    windows = simulated.windows(2, packs=2, noise=0.0, in_order=False)
    for name, seconds in {"ready0": 0.01, "done0": 0.01, "ready1": 0.03, "done1": 0.03}.items():
        windows[1].stamps[:, :, windows[1].names.index(name)] += seconds
    np.testing.assert_allclose(join(windows).late[1], 0.03, rtol=0.01)


def test_seconds_of_overlapping_spans_count_once():
    spans = [(4.0, 9.0), (0.0, 3.0), (1.0, 2.0), (8.0, 10.0)]  # in any order
    arrays = [(np.full([2, 3], begin), np.full([2, 3], end)) for begin, end in spans]
    np.testing.assert_array_equal(covered_seconds(arrays), np.full([2, 3], 9.0))
    assert covered_seconds([]) == 0


def test_noise_accuses_nobody():
    for seed in range(20):
        timeline = simulated.timeline(2, noise=0.3, seed=seed)
        assert late_worker(timeline) is None, seed
        assert any(accused(timeline))  # somebody is late now and then


def test_a_worker_that_no_phase_makes_late_is_not_named():
    """The sums reach worker 1 later than worker 0, in every step."""
    windows = simulated.windows(2)
    windows[1].stamps[:] += 0.01
    timeline = join(windows)
    np.testing.assert_allclose(np.median(timeline.late[1]), 0.01, rtol=0.1)
    assert late_worker(timeline) is None
    assert not any("worker 1" in line for line in verdict(timeline))


def test_the_excess_is_that_of_the_steps_in_which_the_phase_is_late():
    timeline = simulated.timeline(2, late=(1, "input", 0.02), noise=0.0)
    phases = {name: seconds.copy() for name, seconds in timeline.phases.items()}
    phases["input"][1, 8:] -= 0.02
    phases["forward"][1, 8:14] += 0.02
    phases["backward"][1, 14:] += 0.02
    named = late_worker(dataclasses.replace(timeline, phases=phases))
    assert (named.phase, named.steps) == ("input", 20)
    assert named.excess == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("phase", ["input", "backward", "apply"])
@pytest.mark.parametrize(("every", "ordinal"), [(2, "2nd"), (3, "3rd"), (4, "4th"), (5, "5th")])
def test_a_worker_that_is_late_in_a_rhythm_is_named(every, ordinal, phase):
    for seed in range(5):
        windows = simulated.windows(3, late=(1, phase, 0.02), every=every, packs=2, seed=seed)
        timeline = join(windows)
        named = late_worker(timeline)
        assert (named.worker, named.phase, named.every) == (1, phase, every)
        assert 20 // every <= named.steps <= named.of <= 20 // every + 1
        assert named.seconds == pytest.approx(0.02, abs=0.0015)
        assert named.excess == pytest.approx(0.02, abs=0.0015)
    *bound, rhythm = verdict(timeline)
    assert len(bound) == 3 and "bound by" in bound[0]
    assert rhythm.startswith("Worker 1 is late by ")
    assert f" ms in every {ordinal} step: its {phase} takes " in rhythm


def test_a_rhythm_shows_among_shorter_delays():
    for seed in range(20):
        windows = simulated.windows(2, late=(1, "input", 0.05), every=4, noise=0.3, seed=seed)
        named = late_worker(join(windows))
        assert (named.worker, named.phase, named.every) == (1, "input", 4), seed


def test_noise_has_no_rhythm():
    for seed in range(200):
        assert late_worker(simulated.timeline(2, noise=0.4, seed=seed)) is None, seed
    # Delays of any length in any steps, but in random order, as often as they hide a rhythm best.
    random = np.random.default_rng(0)
    for steps in (7, 20, 40):
        numbers = np.arange(100, 100 + steps)
        late = random.exponential(size=[500, steps]) * (random.random([500, steps]) < 0.3)
        found = sum(_rhythm(numbers, each) is not None for each in late)
        assert found <= 5, steps  # 1 %; `CHANCE` is half of it


def test_one_long_pause_is_no_rhythm():
    late = np.zeros(40)
    late[[3, 11, 12, 13, 14]] = 0.02, 5.0, 5.0, 5.0, 5.0
    assert _rhythm(np.arange(40), late) is None
    assert _rhythm(np.arange(3), np.ones(3)) is None


def test_a_worker_that_is_late_in_half_of_the_steps_is_not_named():
    even, late = simulated.windows(2, seed=1), simulated.windows(2, seed=1, late=(1, "input", 0.02))
    half = len(even[0].steps) // 2
    start = max(w.stamps[:, half - 1].max() for w in even)
    shift = start - min(w.stamps[:, half - 1, -1].min() for w in late)
    mixed = [
        dataclasses.replace(
            a, stamps=np.concatenate([a.stamps[:, :half], b.stamps[:, half:] + shift], axis=1)
        )
        for a, b in zip(even, late, strict=True)
    ]
    assert late_worker(join(late)).worker == 1
    timeline = join(mixed)
    assert 0 < sum(each is not None for each in accused(timeline)) < len(timeline.steps)
    assert late_worker(timeline) is None


def test_verdicts_without_a_late_worker():
    link = Measured("mirrored", "ring", 2, (Point(1000, 1e-4), Point(4_000_000, 0.0015)))
    timeline = simulated.timeline(2, noise=0.01)
    assert "is bound by compute: 12.0" in verdict(timeline)[0]
    assert "--jit_compile" in verdict(timeline)[2]
    assert share_of_measured(timeline.packs[0], link) == pytest.approx(0.5, rel=0.05)
    assert share_of_measured(timeline.packs[0], None) is None

    (alone,) = simulated.windows(1, noise=0.01)
    inside = [name not in ("input", "apply") for name in alone.names]
    stamps = np.where(inside, np.nan, alone.stamps)
    timeline = join([dataclasses.replace(alone, stamps=stamps)])
    phases = {name for name, seconds in timeline.phases.items() if (seconds > 0).any()}
    assert phases == {"input", "backward"}  # what is one compiled function is not told apart
    assert "XLA compiled the whole step as one program" in verdict(timeline)[1]

    def scaled(**by):  # some phases take longer
        before = dict(simulated.PHASES)
        simulated.PHASES.update({name: before[name] * factor for name, factor in by.items()})
        try:
            return simulated.timeline(2, noise=0.01)
        finally:
            simulated.PHASES.update(before)

    assert "bound by input" in verdict(scaled(input=30))[0]
    assert "bound by apply" in verdict(scaled(apply=30))[0]
    first, why, remedy = verdict(scaled(forward=0.1, backward=0.1))
    assert "bound by communication" in first
    assert "pack0 moves 3.8 MiB at a busbw of 1.3" in why and "0% of the communication" in why
    assert "--bytes_per_pack=1000000" in remedy
    _, why, _ = verdict(scaled(forward=0.1, backward=0.1), link)
    assert "50% of what was measured" in why or "49%" in why


@pytest.mark.parametrize(
    ("workers", "replicas", "size", "forward", "splits"),
    [
        (2, 1, 4_000_000, 0.0, True),
        (1, 2, 4_000_000, 0.0, False),  # nothing moves
        (2, 1, 1_500_000, 0.0, False),  # a second collective costs more
        (2, 1, 4_000_000, np.nan, False),  # XLA or micro-batches
    ],
)
def test_a_pack_is_split_only_where_it_can_overlap(workers, replicas, size, forward, splits):
    timeline = simulated.timeline(workers, replicas, noise=0.01)
    nothing = np.zeros(timeline.late.shape)
    packs = tuple(dataclasses.replace(pack, bytes=size) for pack in timeline.packs)
    timeline = simulated.with_phases(timeline, backward=nothing, forward=nothing + forward)
    first, _, remedy = verdict(dataclasses.replace(timeline, packs=packs))
    assert "bound by communication" in first
    assert ("--bytes_per_pack" in remedy) == splits


def test_a_window_survives_its_file(tmp_path):
    windows = simulated.windows(2, 2, packs=2)
    stamps = windows[0].stamps.copy()
    stamps[:, :, 1] = np.nan
    windows[0] = dataclasses.replace(windows[0], stamps=stamps, plan={"collectives": []})
    windows = [dataclasses.replace(each, run="0123") for each in windows]
    for each in windows:
        window.write(each, tmp_path / "inspect")
    back = window.read_all(tmp_path / "inspect")
    for mine, other in zip(windows, back, strict=True):
        for field in dataclasses.fields(window.Window):
            np.testing.assert_equal(getattr(other, field.name), getattr(mine, field.name))


BROKEN = [
    ("kind", "record", "not a window"),
    ("schema", 2, "schema 2"),
    ("worker", 2, "its worker is 2"),
    ("workers", True, "its workers is true"),
    ("names", ["input", "<script>"], "not names of marks"),
    ("steps", [3, 2], "not in ascending order"),
    ("stamps", [[1.0]], "3 dimensions"),
    ("stamps", [], r"shape \[0, 0, 0\]"),
    ("barriers", [[1.0, None]], "not pairs"),
    ("packs", [{"name": "pack0", "bytes": -1}], "its bytes is -1"),
    ("plan", [], "its plan"),
]


@pytest.mark.parametrize(("key", "value", "message"), BROKEN)
def test_a_file_that_is_not_a_window_is_refused(tmp_path, key, value, message):
    content = {**simulated.windows(2, steps=3)[0].to_json(), key: value}
    path = tmp_path / "worker-0.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=message) as error:
        window.read_all(tmp_path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_windows_that_do_not_belong_together(tmp_path):
    with pytest.raises(UsageError, match=r"no worker-\*\.json"):
        window.read_all(tmp_path)
    (tmp_path / "worker-0.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        window.read_all(tmp_path)
    first, second, third = simulated.windows(3)
    for windows, message in (
        ([first, third], "no window of worker 1"),
        ([first, second, third, second], "more than one"),
        ([first, second, dataclasses.replace(third, workers=2)], "different numbers"),
        ([first, second, dataclasses.replace(third, packs=())], "their packs differ"),
        ([first, second, dataclasses.replace(third, run="earlier")], "their identifiers differ"),
        ([first, second, dataclasses.replace(third, steps=third.steps + 1000)], "no two consec"),
    ):
        with pytest.raises(UsageError, match=message):
            join(windows)
