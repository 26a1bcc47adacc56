"""When actions fire, and what a log record holds."""

from __future__ import annotations

import math

import keras
import pytest
from records import Clock

from ctl.base.actions import NEVER, Every, Log, Status, parse_window
from ctl.data import synthetic
from ctl.errors import UsageError
from ctl.jobs.models import dense
from ctl.loop import Evaluator, Loop
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep


def status(step, until=100, scalars=None, steps_per_epoch=10.0, reset=lambda: None):
    return Status(
        step=step,
        until=until,
        steps_per_epoch=steps_per_epoch,
        seconds_per_step=0.1,
        final=step >= until,
        scalars=lambda: scalars or {},
        reset=reset,
    )


@pytest.mark.parametrize(
    ("start", "until", "expected"),
    [
        (0, 40, [20, 40]),  # the last is due once only
        (0, 45, [20, 40, 45]),
        (13, 45, [20, 40, 45]),
        (20, 41, [40, 41]),  # resumed at a multiple, which the run before did
        (13, 15, [15]),
    ],
)
def test_every_fires_exactly_at_multiples_and_at_the_end(start, until, expected):
    """Between calls as those of `Loop.train`: of 7 steps, of fewer when the action is due."""
    steps = []
    every = Every(lambda s: steps.append(s.step), steps=20)
    while start < until:
        start += min(7, until - start, every.steps_until_due(start))
        every(status(start, until))
    assert steps == expected


@pytest.mark.parametrize(
    ("when", "calls", "expected"),
    [
        ({"steps": 20}, [(0, step) for step in (5, 19, 23, 39, 65, 79)], [23, 65]),
        ({"steps": 20}, [(0, 40, 100), (0, 40, 40)], [40]),
        ({"steps": 20}, [(0, step) for step in (60, 35, 40, 20)], [60, 40, 20]),
        (
            {"steps": 50},
            [(0, step, 120) for step in (100, 120, 100, 120, 120)],  # the last: 20 steps in a call
            [100, 120, 100, 120, 120],
        ),
        (
            {"seconds": 10},
            [(50, 0), (6, 1), (5, 2), (6, 3), (25, 4), (4, 5), (6, 6)],  # 50: tracing
            [2, 4, 6],
        ),
        ({"steps": 10, "seconds": 5}, [(0, 1), (6, 4), (3, 10), (3, 12), (3, 14)], [4, 10, 14]),
    ],
    ids=[
        *("calls miss a multiple", "the data ends at a step it fired at", "an older state"),
        *("ends again after an older state", "by seconds", "by whichever comes first"),
    ],
)
def test_every_fires(when, calls, expected):
    """``calls``: the seconds since the one before, the step and the end of the training."""
    clock, steps = Clock(), []
    every = Every(lambda s: steps.append(s.step), clock=clock, **when)
    for seconds, *place in calls:
        clock.now += seconds
        every(status(*place))
    assert steps == expected


def test_seconds_limit_no_call():
    assert Every(print, seconds=10).steps_until_due(3) == NEVER


@pytest.mark.parametrize(
    "when",
    [{}, {"steps": 0}, {"steps": -1}, {"steps": 2.5}, {"seconds": 0}, {"seconds": math.nan}],
)
def test_every_refuses(when):
    with pytest.raises(UsageError, match="Every"):
        Every(print, **when)


def test_every_refuses_what_it_cannot_call():
    with pytest.raises(UsageError, match="callable"):
        Every(100, steps=10)


class Memory:
    def __init__(self):
        self.records, self.closed = [], False

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.closed = True


def test_log_reads_once_writes_to_every_sink_and_starts_a_new_window():
    events, sinks = [], [Memory(), Memory()]

    def scalars():
        events.append("read")
        return {"loss": 0.5, "accuracy": 0.75}

    log = Log(*sinks, clock=lambda: 1234.5)
    wake = status(25, reset=lambda: events.append("reset"))
    wake.scalars = scalars
    log(wake)
    assert events == ["read", "reset"]
    expected = {"phase": "train", "step": 25, "until": 100, "epoch": 2.5, "time": 1234.5}
    assert [s.records for s in sinks] == [[{**expected, "loss": 0.5, "accuracy": 0.75}]] * 2


def test_log_of_an_evaluation():
    sink = Memory()
    log = Log(sink, clock=lambda: 1.0)
    log.evaluated(10, {"loss": 0.5})  # resumed right before it: the epoch is not known yet
    log(status(20))
    log.evaluated(20, {"loss": 0.25})
    log.tested(20, {"loss": 0.75})
    before, _, after, tested = sink.records
    assert tested == {**after, "phase": "test", "loss": 0.75}
    assert before == {"phase": "eval", "step": 10, "epoch": None, "time": 1.0, "loss": 0.5}
    assert after == {"phase": "eval", "step": 20, "epoch": 2.0, "time": 1.0, "loss": 0.25}


def test_log_without_sinks_ends_the_window():
    resets = []
    Log()(status(1, reset=lambda: resets.append(1)))
    assert resets == [1]


def test_log_refuses_a_metric_with_the_name_of_a_key():
    with pytest.raises(UsageError, match="'step'.*rename"):
        Log(Memory())(status(1, scalars={"loss": 1.0, "step": 2.0}))


def test_log_closes_all_sinks_though_one_fails():
    class Broken(Memory):
        def close(self):
            raise OSError("full")

    first, last = Memory(), Memory()
    with pytest.raises(OSError, match="full"):
        Log(first, Broken(), last).close()
    assert first.closed and last.closed


@pytest.mark.slow
def test_a_plain_function_and_a_log_in_a_real_loop(mirrored):
    strategy = mirrored(2)
    data = synthetic((4, 4, 1), num_examples=64, global_batch_size=8)
    test = synthetic((4, 4, 1), num_examples=20, global_batch_size=8, training=False)
    with strategy.scope():
        model = dense((4, 4, 1), 10)
        accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
        step = TrainStep(model, keras.optimizers.SGD(0.25), metrics=[accuracy])
        evaluator = Evaluator(EvalStep(model), test, strategy=strategy)
    mine, sink = {}, Memory()
    log = Log(sink)

    def read(status):
        mine[status.step] = status.scalars()["loss"]

    loop = Loop(
        step,
        data,
        strategy=strategy,
        evaluator=evaluator,
        actions=[Every(read, steps=5), Every(log, steps=10)],
        eval_actions=[log.evaluated],
        steps_per_loop=4,
    )
    loop.train(20)
    loop.evaluate()
    assert list(mine) == [5, 10, 15, 20]
    first, second, evaluated = sink.records
    assert (first["step"], first["epoch"], first["learning_rate"]) == (10, 1.25, 0.25)
    assert (first["loss"], second["loss"]) == (mine[10], mine[20])
    assert mine[10] != mine[5]
    assert set(second) >= {"accuracy", "examples_per_second"}
    assert (evaluated["phase"], evaluated["step"]) == ("eval", 20)


def test_parse_window():
    assert parse_window("20:30") == (20, 30)
    assert parse_window(" 1 : 2 ") == (1, 2)


@pytest.mark.parametrize(
    "text", ["", "20", "20-30", "30:20", "20:20", "0:5", "-1:5", "a:b", "1:2:3"]
)
def test_parse_window_refuses(text):
    with pytest.raises(UsageError, match="START:STOP"):
        parse_window(text)
