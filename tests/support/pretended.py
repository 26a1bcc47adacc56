"""A loop whose steps are pretended, to test what is around them."""

from __future__ import annotations

import types

import tensorflow as tf

from ctl.loop import CallResult


class Pretend:
    """In place of the compiled steps: each takes this long on a clock of its own. What `Loop` does
    around them is all there is to test, so nothing is traced."""

    def __init__(self, loop, monkeypatch, seconds_per_step=0.01):
        self.calls: list[int] = []
        self.seconds_per_step = seconds_per_step
        self._now = 0.0
        self._global_step = loop.step.global_step
        clock = types.SimpleNamespace(perf_counter=lambda: self._now)
        monkeypatch.setattr("ctl.loop.time", clock)
        loop.steps.call = self

    def __call__(self, feed, steps, report, trace_key):
        steps = int(steps)
        self.calls.append(steps)
        self._now += steps * self.seconds_per_step
        self._global_step.assign_add(steps)
        totals = tf.constant([1.0, float(steps), *report.numpy()])
        return CallResult(totals, tf.constant(steps), feed.position, self._global_step.value())
