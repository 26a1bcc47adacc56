"""Marks: what they stamp, and that they change nothing."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, examples, make_loop, precision

from ctl.base import tf_internals
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.inspect.session import Inspection
from ctl.loop import Loop
from ctl.phases.marks import Latest, Marks, Ring
from ctl.phases.observer import NO_OBSERVER


def inspectable(strategy, **options) -> Loop:
    data = InMemory(examples(), global_batch_size=BATCH)
    return make_loop(strategy, data=data, seed=0, steps_per_loop=10, clip_norm=1.0, **options)


def inspect(loop: Loop, keep: int = 20) -> tuple[Ring, Latest]:
    ring, latest = Ring(loop.step, keep), Latest(loop.step)
    loop.step.observer = Marks(loop.step, ring, latest)
    return ring, latest


def graph_of(loop: Loop) -> tf.compat.v1.GraphDef:
    return loop.traced().graph.as_graph_def()


def nodes_of(definition: tf.compat.v1.GraphDef) -> list[str]:
    """Every operation and its inputs, without the numbers in names, which grow in a process."""
    bodies = [definition.node, *(f.node_def for f in definition.library.function)]
    lines = (" ".join([n.op, n.name, *n.input, *sorted(n.attr)]) for body in bodies for n in body)
    return sorted(re.sub(r"_?\d+", "", line) for line in lines)


def same_variables(a: Loop, b: Loop) -> None:
    for mine, other in zip(a.step.model.variables, b.step.model.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy(), err_msg=mine.path)


@pytest.mark.slow
def test_weights_are_the_same_and_the_graph_is_what_it_was(mirrored):
    plain, inspected = (inspectable(mirrored(2)) for _ in "ab")
    plain.train(60)
    inspected.train(20)
    before = graph_of(inspected).SerializeToString(deterministic=True)
    inspect(inspected)
    inspected.train(40)
    with_marks = nodes_of(graph_of(inspected))
    inspected.step.observer = NO_OBSERVER
    inspected.train(60)
    assert inspected.steps.run.experimental_get_tracing_count() == 2
    assert graph_of(inspected).SerializeToString(deterministic=True) == before
    assert nodes_of(graph_of(inspected)) == nodes_of(graph_of(plain))
    assert sum(line.startswith("Timestamp") for line in with_marks) == 12
    assert len(with_marks) > len(nodes_of(graph_of(plain)))
    same_variables(plain, inspected)


PACKED = ["ready0", "done0"]
SEVERAL = [f"{moment}{pack}" for pack in range(4) for moment in ("ready", "done")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "forward", "packed"),
    [
        ({"bytes_per_pack": 100}, True, SEVERAL),
        ({"accumulate_steps": 2}, False, PACKED),
        ({"jit_compile": True, "accumulate_steps": 2}, False, PACKED),
        ({"loss_scale": True, "ema_decay": 0.9}, True, PACKED),
    ],
    ids=["packs", "accumulate", "jit", "float16"],
)
def test_stamps(mirrored, options, forward, packed):
    with precision("mixed_float16" if "loss_scale" in options else "float32"):
        loop = inspectable(mirrored(2), **options)
    ring, latest = inspect(loop, keep=8)
    loop.train(60)
    sizes = [v.shape.num_elements() for v in loop.step.model.trainable_variables]
    assert sum(loop.step.observer.pack_bytes) == 4 * sum(sizes)
    assert len(loop.step.observer.pack_bytes) == len(packed) // 2
    assert not loop.step.observer.in_order  # no collectives: the replicas share memory
    steps, stamps = ring.read()
    assert steps.tolist() == list(range(52, 60))  # the last 8, by how many were trained before
    assert (
        ring.names == (*latest.names, "apply") == ("input", "forward", "backward", *packed, "apply")
    )
    assert stamps.shape == (2, 8, len(ring.names))
    missing = np.isnan(stamps).all(axis=(0, 1))
    assert missing.tolist() == [n == "forward" and not forward for n in ring.names]
    at = dict(zip(ring.names, np.moveaxis(stamps, 2, 0), strict=True))
    # A busy machine stamps late now and then, so the order is that of medians.
    order = ["input", *(["forward"] if forward else []), "backward", "apply"]
    # One pack has all gradients; the last of several need not wait for those of the others.
    order[-1:-1] = packed[-1:] if len(packed) == 2 else []
    for earlier, later in itertools.pairwise(order):
        assert np.median(at[later] - at[earlier]) > 0, (earlier, later)
    assert np.median(at["input"][:, 1:] - at["apply"][:, :-1]) > 0
    for number in range(len(packed) // 2):
        assert np.median(at[f"done{number}"] - at[f"ready{number}"]) > 0
        assert np.median(at["apply"] - at[f"done{number}"]) > 0
    # If stamps waited for each other, replica 1's would all come after replica 0's apply.
    assert np.median(at["input"][1] - at["apply"][0]) < 0

    last = latest.read(59)
    np.testing.assert_allclose(
        last[:, ~missing[:-1]], stamps[:, -1, ~missing][:, :-1], rtol=0, atol=0.01
    )
    assert np.isnan(latest.read(58)).all()
    # In the loop of micro-batches the last one's forward pass is stamped, unless XLA compiles it.
    assert np.isfinite(last[:, 1]).all() == ("jit_compile" not in options)

    ring.clear()
    assert len(ring.read()[0]) == 0


@pytest.mark.slow
def test_a_step_compiled_as_one():
    """One replica, all of the step in XLA: its begin and its end can be stamped."""
    plain, inspected = (inspectable(tf.distribute.get_strategy(), jit_compile=True) for _ in "ab")
    ring, _ = inspect(inspected)
    plain.train(20), inspected.train(20)
    same_variables(plain, inspected)
    steps, stamps = ring.read()
    known = ["input", "apply"]
    assert np.isfinite(stamps).tolist() == [[[name in known for name in ring.names]] * len(steps)]
    with Inspection(inspected, steps=5) as seen:
        inspected.train(40)
    phases = {name: np.isfinite(seconds).all() for name, seconds in seen.timeline.phases.items()}
    assert not (phases["forward"] or phases["apply"]) and phases["backward"]
    assert (seen.timeline.phases["backward"] > 0).any()


def test_without_the_private_name(mirrored, monkeypatch):
    monkeypatch.setattr(tf_internals, "_MANAGER", "no_such_name")
    loop = inspectable(mirrored(1))
    with pytest.raises(UsageError, match=r"no Graph\.no_such_name.*cannot be shown"):
        Marks(loop.step, Ring(loop.step, 4))
    with pytest.raises(UsageError, match="late workers cannot be shown"):
        Inspection(loop)
    assert loop.step.observer is NO_OBSERVER  # so it trains as before


def test_replicas_that_share_their_variables_are_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0")
    loop = inspectable(strategy)
    with pytest.raises(UsageError, match="--strategy=mirrored"):
        Ring(loop.step, 4)
