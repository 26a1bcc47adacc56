"""What a checkpoint holds: the table of its page, and the state of a step that has all groups."""

from __future__ import annotations

import re

import keras
import tensorflow as tf
from helpers import make_loop
from paths import ROOT

from ctl.distributed import workers
from ctl.phases.sparse_rows import Tables
from ctl.schedule.patience import EarlyStopping
from ctl.step import TrainStep


class HasAll(TrainStep):
    def __init__(self, *args, **options):
        super().__init__(*args, ema_decay=0.9, loss_scale=True, **options)
        self.seeds_of_keras = keras.random.SeedGenerator(1)
        self.left = self.variable("left", [2], per_replica=True)


class Late:
    """Stands for a table that is trained by rows, which no step with ``ema_decay`` has."""

    table = keras.Variable([0.0])
    variables = ()


def test_a_worker_restores_the_step_of_the_chief(tmp_path, monkeypatch):
    """Which may have waited for one that still saved, or sees what others do not yet."""
    loop = make_loop(directory=tmp_path)
    for step in (2, 4):
        loop.train(step, total=4)
        loop.save(wait=True)
    for of_chief, restored in ((2, 2), (4, 4), (-1, 4), (3, 4)):  # there is no step 3 here
        monkeypatch.setattr(workers, "step_of_chief", lambda strategy, step, s=of_chief: s)
        resumed = make_loop(directory=tmp_path)
        assert resumed.restore().step == resumed.global_step == restored
        resumed.checkpoints.close()


def groups_of_the_page() -> list[str]:
    page = (ROOT / "ctl/checkpoint/README.md").read_text("utf-8")
    table = page[page.index("| group | tensors |") :].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)`", table, re.MULTILINE)


def test_the_page_has_every_group(mirrored, monkeypatch):
    loop = make_loop(mirrored(2), step_class=HasAll)
    monkeypatch.setattr(Tables, "deferred", [Late()])
    loop.eval_actions.append(EarlyStopping("loss", patience=3))
    loop.train_only([loop.step.model.layers[-1]])
    loop.step.jit_compile = True
    state = loop.state.variables()
    assert sorted(state) == sorted(groups_of_the_page())
    assert all(isinstance(v.name, str) and isinstance(v.dtype, tf.DType) for v in state["trained"])
