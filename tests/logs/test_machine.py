"""Scalars about the machine: tokens, utilization and memory."""

from __future__ import annotations

import pytest
from helpers import make_loop

from ctl.logs import machine
from ctl.logs.progress import format_record
from ctl.phases.loss_accumulator import CallTotals
from ctl.step import TrainStep


class CountsTokens(TrainStep):
    counts = "tokens"


def test_what_is_added_to_a_record(mirrored, monkeypatch):
    monkeypatch.setattr(machine, "peak_flops", lambda dtype: {"float32": 1e6}[dtype])
    loop = make_loop(mirrored(2), step_class=CountsTokens)
    scalars = loop.scalars
    utilization = machine.utilization(loop.strategy, lambda: loop.step.flops)
    scalars.extras += [utilization, machine.peak_memory]
    loop.traced()
    assert "mfu" not in scalars.read()  # nothing is timed yet
    scalars.add(CallTotals(1.0, 100.0, 0, 0, 0, []), 0)  # not timed, as the first call
    scalars.add(CallTotals(1.0, 60.0, 0, 0, 0, []), 0)
    scalars.add_time(0.5, 2)
    read = scalars.read()
    assert read["tokens_per_second"] == 120
    assert read["examples_per_second"] == 2 * 16 / 0.5
    assert read["mfu"] == pytest.approx(64 * loop.step.flops / 1e6)  # two logical CPUs are one
    assert 10 < read["peak_memory_mib"] < 1e6
    loop.step.flops = None
    assert "mfu" not in scalars.read()
    read |= {"gradient_norm": 1.5, "weight_norm": 20.0, "update_ratio": 1e-3, "learning_rate": 0.1}
    record = {"phase": "train", "step": 5, "until": 9380, "epoch": 1.0, "time": 0.0, **read}
    first, *others = format_record(record, 43.2).splitlines()
    assert "120 tok/s  0:43 left" in first and max(map(len, [first, *others])) <= 80
    assert others and all(line.startswith("    ") for line in others)
    for piece in ("lr 1.00e-1", "grad norm 1.5000", "update 1.00e-3", "mfu ", " MiB"):
        assert piece in first + others[0] + others[-1]
