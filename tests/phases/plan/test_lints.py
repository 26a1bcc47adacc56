"""Each lint is provoked by a step that has the fault; a sensible step has none."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, examples, make_loop, mlp, sgd
from paths import SUPPORT
from worker_jobs import last_line, run_job

from ctl import data
from ctl.phases.plan import lints
from ctl.phases.plan.plan import Plan, from_json
from ctl.phases.plan.xla import read_hlo
from ctl.step import TrainStep


def plan_of(strategy, step_class=TrainStep, model=mlp, dataset=None, **options) -> Plan:
    of = {"step_class": step_class, "model": model, "optimizer": sgd(), "data": dataset}
    return make_loop(strategy, **of, **options).plan()


def found(plan: Plan) -> set[str]:
    return {lint.name for lint in plan.lints}


class KerasApplies(TrainStep):
    def apply(self, gradients, finite=None):
        self.optimizer.apply(gradients)
        self.global_step.assign_add(1)


class Sparse(TrainStep):
    """Sums the rows of the table by itself."""

    def reduce(self, loss, count, gradients, snapshot):
        table, *others = gradients
        rows = tf.IndexedSlices(table, tf.range(10), tf.constant([10, 6]))
        context = tf.distribute.get_replica_context()
        summed = tf.convert_to_tensor(context.all_reduce(tf.distribute.ReduceOp.SUM, rows))
        loss, total, rest = super().reduce(loss, count, [None, *others], snapshot)
        return loss, total, [summed, *rest[1:]]


class LeavesRows(TrainStep):
    """Its gradient of a table is rows, of which some occur twice."""

    def backward(self, tape, loss, variables=None):
        return tape.gradient(loss, self.trainable_variables)


def words() -> keras.Model:
    layers = [keras.layers.Embedding(10, 6), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.layers.Input([4], dtype="int32"), *layers])


def test_reduced_twice(mirrored):
    plan = plan_of(mirrored(2), KerasApplies)
    assert found(plan) == {"reduced twice"}
    assert len(plan.collectives) > 1
    (lint,) = plan.lints
    assert "pack0 are summed over the replicas again by" in lint.reason
    assert "2 times too large" in lint.reason


@pytest.mark.slow
def test_sparse_gradients(mirrored):
    tokens = data.InMemory((np.zeros([64, 4], np.int32), examples(64)[1]), global_batch_size=BATCH)
    plan = plan_of(mirrored(2), Sparse, words, tokens)
    assert found(plan) == {"sparse gradients gathered"}
    assert found(plan_of(mirrored(2), TrainStep, words, tokens)) == set()
    assert found(plan_of(mirrored(2), LeavesRows, words, tokens)) == set()  # ctl makes them dense


def test_a_ring_on_logical_cpus_and_a_timeout_of_tensorflow(ring2):
    assert found(plan_of(ring2)) == {"ring on logical CPUs"}
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=60)
    plan = plan_of(ring2, options=options)
    assert found(plan) == {"ring on logical CPUs", "a thread for every all-reduce"}
    assert "pack0" in plan.lints[1].reason and "60 s" in plan.lints[1].reason


@pytest.fixture(scope="module")
def workers(job, tmp_path_factory) -> Path:
    """Where two workers left what they planned; see plan_worker.py."""
    out = tmp_path_factory.mktemp("plans")
    run_job(job, out, program=SUPPORT / "plan_worker.py", code=2)
    return out


@pytest.fixture(scope="module")
def plans(workers) -> list[dict[str, Plan]]:
    texts = [(workers / f"plans-{i}.json").read_text() for i in range(2)]
    return [{k: from_json(v) for k, v in json.loads(text).items()} for text in texts]


def test_two_workers_with_a_sensible_step(plans):
    for kind in ("clean", "packs"):
        assert plans[0][kind] == plans[1][kind]
        assert plans[0][kind].lints == ()
        assert lints.differing([plans[i][kind] for i in range(2)]) == ()
    clean = plans[0]["clean"]
    assert (clean.workers, clean.replicas, clean.strategy) == (2, 2, "CollectiveAllReduceStrategy")
    (pack,) = clean.collectives
    assert (pack.kind, pack.ops, pack.group_size) == ("CollectiveReduceV2", 1, 2)
    assert (pack.timeout, pack.wire_bytes) == (0, pack.bytes)
    (unwatched,) = lints.check(clean, watched=False)
    assert unwatched.name == "no timeout" and "pack0" in unwatched.reason
    shares = [c.start_share for c in plans[0]["packs"].collectives]
    assert len(shares) == 3 and shares == sorted(shares) and shares[1] < 0.6 and shares[2] == 1


def test_the_wire_carries_what_the_plan_says(workers):
    """By Linux's count of each worker's own sockets, whatever else the machine sends."""
    files = sorted(workers.glob("wire-*.json"))
    assert len(files) == 2
    for file in files:
        bytes_ = json.loads(file.read_text())
        assert bytes_["planned"] > 2.5e7
        assert 0.9 < bytes_["counted"] / bytes_["planned"] < 1.1


def test_data_that_end_are_asked_for(plans):
    plan = plans[0]["data that end"]
    assert plan.collectives == () and {c.purpose for c in plan.other} == {"has data"}
    assert all(c.dtype == "int64" and c.bytes == 8 and c.in_loop for c in plan.other)


def test_no_overlap(plans):
    plan = plans[0]["one pack"]
    assert found(plan) == {"no overlap"}
    assert plan.collectives[0].bytes > lints.WORTH_SPLITTING
    (lint,) = plan.lints
    assert lint.remedy.startswith(f"--bytes_per_pack={plan.collectives[0].bytes // 4}:")


@pytest.mark.parametrize("kind", ["micro-batches", "compiled"])
def test_what_is_done_all_at_once_cannot_overlap(plans, kind):
    (pack,) = plans[0][kind].collectives
    assert pack.bytes > lints.WORTH_SPLITTING and pack.start_share == 1
    assert plans[0][kind].lints == ()


def test_page_faults(plans):
    assert found(plans[0]["large"]) == {"no overlap", "page faults"}


def test_plans_that_differ(plans, workers):
    differ = [plans[i]["one more"] for i in range(2)]
    (lint,) = lints.differing(differ)
    assert lint.name == "plans differ" and "absent" not in lint.reason
    assert differ[0].fingerprint != differ[1].fingerprint
    for index in range(2):
        line = last_line(workers, index)
        assert "the workers do not agree: all-reduce 1 is" in line, line
        assert "the plan of all of them is" in line


def test_xla_merges_packs(workers):
    plan = from_json(json.loads((workers / "compiled.json").read_text()))
    assert found(plan) == {"XLA merged the packs"}
    (fused,) = plan.xla
    assert fused.payloads == 3
    assert fused.bytes == sum(c.bytes for c in plan.collectives)


def test_all_reduces_in_hlo():
    text = """
      %all-reduce.1 = bf16[3,4]{1,0} all-reduce(%x), metadata={op_name="pack0/C"}
      ROOT %a = (f32[5]{0}, f32[]) all-reduce-start(%y, %z), channel_id=1
      %six = (f32[5], f32[1], f32[2], f32[3], f32[4], /*index=5*/f32[6]{0}) all-reduce(%x)
      %types = (pred[3]{0}, bf16[3]{0}, u16[3]{0}, u64[3]{0}, c64[3]{0}) all-reduce(%x)
      %get-tuple-element = f32[5]{0} get-tuple-element(%all-reduce), index=0
      %done = f32[5]{0} all-reduce-done(%a)
    """
    seen = [(f.name, f.payloads, f.bytes) for f in read_hlo(text)]
    assert seen == [("pack0/C", 1, 24), ("", 2, 24), ("", 6, 84), ("", 5, 3 * (1 + 2 + 2 + 8 + 8))]
