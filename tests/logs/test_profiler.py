"""A profile holds exactly the steps that were asked for."""

from __future__ import annotations

import importlib.metadata
import logging as python_logging
from types import SimpleNamespace

import pytest
import tensorflow as tf
from absl import logging
from helpers import make_loop
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from ctl.base import console
from ctl.base.actions import NEVER, Every
from ctl.errors import UsageError
from ctl.logs.profiler import Profile


def steps_in(directory):
    """``step_num`` of every ``ctl_step`` marker of the one trace in ``directory``; None without."""
    files = list(directory.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        return None
    (file,) = files
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    steps = []
    for plane in space.planes:
        stats = {key: meta.name for key, meta in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if plane.event_metadata[event.metadata_id].name == "ctl_step":
                    steps += [
                        s.int64_value for s in event.stats if stats[s.metadata_id] == "step_num"
                    ]
    return sorted(steps)


@pytest.fixture(scope="module")
def loop(mirrored):
    return make_loop(mirrored(1), steps_per_loop=50)


@pytest.fixture
def train(loop):
    """``train(until, *actions, start=0)``: trains the loop of all tests."""

    def run(until, *actions, start=0):
        loop.actions[:] = actions
        loop.step.global_step.assign(start)
        loop.train(until)

    return run


def test_a_profile_has_one_marker_for_each_step_of_the_window(mirrored, tmp_path, caplog):
    profile = Profile(7, 10, tmp_path)
    loop = make_loop(mirrored(2), actions=[profile], steps_per_loop=50)
    logging.set_verbosity(logging.INFO)
    with caplog.at_level(python_logging.INFO, logger="absl"):
        loop.train(40)
    assert steps_in(tmp_path) == [7, 8, 9]
    assert f" -m tensorboard.main --logdir={tmp_path}, tab Profile" in caplog.text


@pytest.mark.parametrize(
    ("plugins", "said"),
    [({"scalars", "profile"}, ""), ({"scalars"}, "{0} -m pip install 'ctl[profile]', then ")],
)
def test_the_command_that_shows_it_names_what_is_missing(
    train, tmp_path, caplog, monkeypatch, plugins, said
):
    """TensorBoard finds its tabs as entry points of packages."""
    found = SimpleNamespace(names=plugins)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    logging.set_verbosity(logging.INFO)
    with caplog.at_level(python_logging.INFO, logger="absl"):
        train(9, Profile(7, 8, tmp_path / "a run"))
    python = console.python()
    line = f"{said}{{0}} -m tensorboard.main --logdir='{tmp_path}/a run', tab Profile"
    assert f"profile of steps 7 to 7: {line.format(python)}\n" in caplog.text


@pytest.mark.parametrize(
    ("resumed_at", "until", "expected"),
    [
        (6, 20, [7, 8, 9]),  # step 6 is the first of the process
        (7, 20, [8, 9]),
        (9, 20, None),
        (15, 20, None),
        (0, 8, [7]),  # ends inside
    ],
)
def test_a_resumed_or_short_run_profiles_what_there_is(
    train, tmp_path, resumed_at, until, expected
):
    train(until, Profile(7, 10, tmp_path), start=resumed_at)
    assert steps_in(tmp_path) == expected


def test_close_ends_a_trace_when_training_fails_inside(loop, train, tmp_path):
    profile = Profile(3, 10, tmp_path)

    def fail(status):
        if status.step == 5:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(20, profile, Every(fail, steps=1))
    profile.close()
    assert steps_in(tmp_path) == [3, 4]
    profile.close()  # nothing left to do
    loop.train(20)
    assert steps_in(tmp_path) == [3, 4]  # once


def test_steps_are_single_inside_the_window_only(tmp_path):
    profile = Profile(7, 10, tmp_path)
    due = [profile.steps_until_due(step) for step in (0, 6, 7, 9, 10, 50)]
    assert due == [7, 1, 1, 1, NEVER, NEVER]


def test_another_profiler_is_in_the_way(train, tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(UsageError, match="another profiler"):
            train(10, Profile(2, 4, tmp_path))
    finally:
        tf.profiler.experimental.stop(save=False)


@pytest.mark.parametrize("window", [(0, 5), (5, 5), (6, 5)])
def test_profile_refuses(window, tmp_path):
    with pytest.raises(UsageError, match="1 <= start < stop"):
        Profile(*window, tmp_path)
