"""SIGTERM and SIGINT: the state of a whole step is saved, whatever the loop was doing."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import make_loop
from paths import SUPPORT

from ctl.base.actions import Every
from ctl.checkpoint import CheckpointManager
from ctl.errors import Preempted, UsageError
from ctl.flags.parsing import exit_codes
from ctl.loop import Loop
from ctl.step import TrainStep

UNTIL = 24


class SignalWhileTracing(TrainStep):
    signals: list[int] = []

    def loss(self, batch):
        while self.signals:
            signal.raise_signal(self.signals.pop())
        return super().loss(batch)


def stoppable(directory=None, *, seed=0, **options) -> Loop:
    return make_loop(
        tf.distribute.get_strategy(),
        step_class=SignalWhileTracing,
        evaluate=40,
        directory=directory,
        seed=seed,
        ema_decay=0.9,
        **options,
    )


def state_of(loop) -> list[np.ndarray]:
    return [v.numpy() for group in loop.step.state().values() for v in group]


@functools.cache
def uninterrupted():
    loop = stoppable()
    results = loop.train_and_evaluate(UNTIL, evaluate_every=10)
    return results, state_of(loop)


def resumes(directory, step: int) -> None:
    """The state on the disk is that of ``step``, and leads to where it would have led."""
    results, state = uninterrupted()
    loop = stoppable(directory, seed=1)
    assert loop.restore().step == loop.global_step == step
    assert loop.train_and_evaluate(UNTIL, evaluate_every=10) == results
    loop.checkpoints.close()
    np.testing.assert_equal(state_of(loop), state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("tracing", signal.SIGINT),
        ("in an action", signal.SIGTERM),
        ("evaluating", signal.SIGTERM),
        ("between", signal.SIGINT),
    ],
)
def test_a_signal_saves_a_whole_step(tmp_path, number, moment):
    step = {"tracing": 1, "in an action": 7, "evaluating": 20, "between": 11}[moment]
    options = {}
    if moment == "in an action":
        act = Every(lambda s: signal.raise_signal(number) if s.step == 7 else None, steps=7)
        options["actions"] = [act]
    if moment == "between":  # after the evaluation at step 10: one more call of one step
        options["eval_actions"] = [lambda step, results: signal.raise_signal(number)]
        options["steps_per_loop"] = 1
    loop = stoppable(tmp_path, **options)
    if moment == "tracing":
        loop.step.signals = [number]

    if moment == "evaluating":
        run = loop.evaluator._eval_steps

        def interrupted(*args):
            if loop.global_step == 20:
                signal.raise_signal(number)
                assert not np.array_equal(loop.step.model.get_weights()[0], trained[0])
            return run(*args)

        interrupted.get_concrete_function = run.get_concrete_function
        loop.evaluator._eval_steps = interrupted

    trained = []
    loop.actions.append(lambda s: trained.__setitem__(slice(None), loop.step.model.get_weights()))
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Preempted) as error, loop.stop_on_signals():
        loop.train_and_evaluate(UNTIL, evaluate_every=10)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert error.value.exit_code == 42
    path = tmp_path / f"step-{step:010d}"
    assert (
        str(error.value) == f"{number.name}: saved step {step} in {path}; the same command resumes"
    )
    np.testing.assert_equal(loop.step.model.get_weights(), trained)
    loop.checkpoints.close()
    resumes(tmp_path, step)


def test_the_second_interrupt_is_at_once(tmp_path):
    def twice(status):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # the first of its kind
        reached.append(status.step)
        signal.raise_signal(signal.SIGINT)
        reached.append("not here")

    reached = []
    loop = stoppable(tmp_path, actions=[Every(twice, steps=5)])
    with pytest.raises(KeyboardInterrupt), loop.stop_on_signals():
        loop.train(20)
    assert reached == [5]
    loop.checkpoints.close()
    assert loop.checkpoints.all() == []

    with loop.stop_on_signals():  # what came before is forgotten
        loop.actions.clear()
        loop.train(8)
    assert loop.global_step == 8


def test_a_signal_without_checkpoints():
    loop = stoppable(actions=[Every(lambda s: signal.raise_signal(signal.SIGTERM), steps=3)])
    with pytest.raises(Preempted, match="SIGTERM at step 3: nothing saved"), loop.stop_on_signals():
        loop.train(20)


def test_signals_need_the_main_thread():
    loop, errors = stoppable(), []

    def enter():
        try:
            with loop.stop_on_signals():
                pass
        except UsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == ["signals can be handled in the main thread only"]


@pytest.mark.parametrize(
    ("numbers", "steps", "code"),
    [
        ([signal.SIGTERM], 10_000, 42),
        ([signal.SIGINT, signal.SIGINT], 10**9, 130),
    ],
)
def test_a_process_that_is_told_to_stop(zygote, tmp_path, numbers, steps, code):
    """From outside, in the middle of a call: it ends and the state is saved; a second Ctrl-C ends
    the process, however long the call would take."""
    path = Path(__file__).parent, SUPPORT
    process = zygote.start(Path(__file__).stem, str(tmp_path), str(steps), path=path)
    process.until("training\n", "stdout")
    for number in numbers:
        process.signal(number)
        time.sleep(0.03)
    assert process.wait() == code, process.stderr
    last = process.stderr.splitlines()[-1]
    if code == 130:
        assert last == "interrupted"
        return
    step = CheckpointManager(tmp_path, read_only=True).latest().step
    assert last.startswith(f"{numbers[0].name}: saved step {step} in ")
    assert step % steps == 1 and step > 1


def run() -> None:
    """What the process of the last test runs."""
    directory, steps = sys.argv[1:]

    def announce(status):
        if status.step == 1:
            # From another thread, while the main one is inside of the next call.
            threading.Timer(0.05, lambda: print("training", flush=True)).start()

    signal.alarm(120)  # whatever becomes of the test
    loop = stoppable(Path(directory), actions=[announce])
    loop.train(1)
    loop._pace.steps = lambda: int(steps)
    with exit_codes(), loop.checkpoints, loop.stop_on_signals():
        loop.train(10**9 + 1)
