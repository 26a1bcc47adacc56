"""A resumed run is the uninterrupted run, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    assert_replicas_agree,
    examples,
    largest_difference,
    make_loop,
    precision,
)

from ctl.base.actions import Every
from ctl.base.durable import Lock
from ctl.checkpoint import CheckpointManager
from ctl.control.evaluator import Evaluator
from ctl.data import Augmented, GlobalBatches, InMemory
from ctl.errors import CheckpointError, DivergedError, UsageError
from ctl.loop import Loop, Steps
from ctl.phases.base_step import EvalStep
from ctl.schedule import make_schedule
from ctl.step import TrainStep

EXAMPLES = 100  # 6.25 batches: saves at steps 17 and 12 are in the middle of an epoch


class InfinityAtStep5(TrainStep):
    """So that there are a skipped update and a halved loss scale to restore."""

    def backward(self, tape, loss, variables=None):
        bad = tf.where(tf.equal(self.global_step, 5), np.inf, 0.0)
        return [g + tf.cast(bad, g.dtype) for g in super().backward(tape, loss, variables)]


def everything(seed: int) -> keras.Model:
    """Dropout twice (an explicit seed, the seed of the model), BatchNorm twice."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input([FEATURES]),
            keras.layers.Dense(16, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dropout(0.3),
            keras.layers.Activation("relu"),
            keras.Sequential(
                [
                    keras.layers.Dense(8, use_bias=False),
                    keras.layers.BatchNormalization(momentum=0.9),
                ]
            ),
            keras.layers.Dropout(0.2, seed=seed + 7),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )


def groups_of(model: keras.Model) -> list[tuple]:
    """An optimizer for each kernel that does more than `update_step`, or begins with the weights;
    AdamW for the rest."""
    of = keras.optimizers
    kinds = [of.Nadam, of.Muon, getattr(of, "ScheduleFreeAdamW", of.Adam)]
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    rest = [v for v in model.trainable_variables if v.name != "kernel"]
    own = [(kind(0.01), [v]) for kind, v in zip(kinds, kernels, strict=True)]
    return [(of.AdamW(0.01, weight_decay=0.1), rest), *own]


def fresh(
    strategy, directory, *, seed=0, data=None, jit_compile=False, groups=False, **options
) -> Loop:
    """Everything anew, as a new process has it; weights and masks differ with ``seed``."""
    with precision("mixed_float16"), strategy.scope():
        model = everything(seed)
        step = InfinityAtStep5(
            model,
            groups_of(model) if groups else keras.optimizers.AdamW(0.01, weight_decay=0.1),
            metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
            clip_norm=0.5,
            accumulate_steps=2,
            ema_decay=0.9,
            loss_scale=True,
            jit_compile=jit_compile,
        )
    if data is None:
        data = InMemory(examples(EXAMPLES), global_batch_size=BATCH, seed=5)
        data.steps_per_element = 8
    loop = Loop(
        step,
        data,
        strategy=strategy,
        schedule=make_schedule("cosine", learning_rate=0.02, total_steps=30, warmup_steps=4),
        checkpoints=CheckpointManager(directory) if directory else None,
        **options,
    )
    step.updater.loss_scale.growth_steps = 4
    return loop


def bits(loop) -> dict[str, np.ndarray]:
    """Every variable of the state, on every replica."""
    result = {}
    for key, variables in loop.step.state().items():
        for i, variable in enumerate(variables):
            copies = loop.strategy.experimental_local_results(variable)
            for replica, copy in enumerate(copies):
                name = re.sub(r"_?\d+", "", variable.name)  # Keras numbers models and layers
                result[f"{key}[{i}] {name} on {replica}"] = copy.numpy()
    return result


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name, strict=True)


def assert_all_is_in_play(state: dict[str, np.ndarray], replicas: int) -> None:
    """What is compared must be able to differ."""

    def values(part: str) -> list[np.ndarray]:
        return [value for name, value in state.items() if part in name]

    assert len(values("seed_generator_state")) == 2 * replicas
    assert len({v.tobytes() for v in values("seed_generator_state")}) == 2 * replicas
    assert len(values("moving_")) == 8 * replicas  # with their averages
    assert all(np.any(v != 0) and np.any(v != 1) for v in values("moving_"))
    assert len(values("ema")) == len({v.tobytes() for v in values("ema")}) * replicas
    assert all(np.any(v != 0) for v in values("momentum") + values("velocity"))
    assert {int(v) for v in values("global_step")} == {30}
    assert min(int(v) for v in values("skipped")) >= 1
    assert 2.0**15 not in {float(v) for v in values("loss_scale")}


# With 2 replicas the order of a sum changes nothing.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "compiled"),
    [
        pytest.param(1, False, marks=pytest.mark.compiled_update),
        (4, False),
        pytest.param(1, True, marks=pytest.mark.compiled_update),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(mirrored, tmp_path, replicas, compiled):
    """Also the chunks (as many steps as fit, 1, 7) and saves on the way change nothing."""
    strategy = tf.distribute.get_strategy() if compiled else mirrored(replicas)
    plain = replicas == 1 and not compiled
    options = {"jit_compile": compiled, "groups": plain}
    first = fresh(strategy, tmp_path, steps_per_loop=1, **options)
    first.train(12)
    first.save()
    first.train(17)
    first.save(wait=True)
    at_17 = bits(first)
    first.train(30)
    first.checkpoints.close()
    want = bits(first)
    assert_all_is_in_play(want, replicas)
    if plain:  # one without saves, which are alike for all
        straight = fresh(strategy, None, **options)
        straight.train(30)
        assert_same(bits(straight), want)

    second = fresh(strategy, tmp_path, seed=1, steps_per_loop=7, **options)
    assert second.restore().step == second.global_step == 17
    assert_same(bits(second), at_17)
    second.train(30)
    assert_same(bits(second), want)

    # In the same process too: back to step 17, on with the same trace.
    assert second.restore().step == 17
    assert_same(bits(second), at_17)
    second.train(30)
    assert_same(bits(second), want)
    assert second.steps.run.experimental_get_tracing_count() == 1
    second.checkpoints.close()


@pytest.mark.parametrize(("kind", "replicas"), [(keras.layers.LSTM, 1), (keras.layers.GRU, 2)])
def test_layers_that_draw_in_an_evaluation_too(mirrored, tmp_path, kind, replicas):
    random = np.random.default_rng(0)
    data = random.normal(size=(32, 5, 3)).astype("float32"), random.integers(0, 2, 32)
    strategy = mirrored(replicas)

    def loop(directory):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.Input([5, 3]), kind(4, dropout=0.5), keras.layers.Dense(2)]
            model = keras.Sequential(layers)
            step = TrainStep(model, keras.optimizers.SGD(0.1), random_seed=1)
            evaluator = Evaluator(EvalStep(model), data, strategy=strategy)
        options = {"evaluator": evaluator, "checkpoints": str(tmp_path / directory)}
        made = Loop(step, data, global_batch_size=8, strategy=strategy, **options)
        made.restore()
        return made

    straight = loop("straight")
    straight.train_and_evaluate(8, evaluate_every=4)
    loop("resumed").train_and_evaluate(4, evaluate_every=4)
    resumed = loop("resumed")
    assert resumed.global_step == 4
    resumed.train_and_evaluate(8, evaluate_every=4)
    assert_same(bits(resumed), bits(straight))


@pytest.mark.slow
def test_another_number_of_replicas_goes_on_with_the_same_batches(mirrored, tmp_path):
    """More and fewer. Without Dropout and BatchNorm, which look at a replica's part of the batch
    only."""

    def small(replicas, seed=0):
        data = InMemory(examples(EXAMPLES), global_batch_size=BATCH, seed=5)
        options = {"clip_norm": 0.5, "ema_decay": 0.9, "directory": tmp_path}
        return make_loop(mirrored(replicas), data=data, seed=seed, **options)

    def values(loop):
        return {k: [v.numpy() for v in group] for k, group in loop.step.state().items()}

    straight = small(2)
    straight.train(17)
    straight.save(wait=True)
    at_17 = values(straight)
    straight.train(30)
    straight.checkpoints.close()
    assert largest_difference(values(straight)["model"], at_17["model"]) > 1e-2

    for after in (4, 1):
        resumed = small(after, seed=1)
        assert resumed.restore().step == 17
        for key, group in values(resumed).items():
            for ours, theirs in zip(group, at_17[key], strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{key}, {after} replicas")
        assert_replicas_agree(resumed.strategy, resumed.step.model.variables)
        resumed.train(30)
        resumed.checkpoints.close()
        for key, group in values(resumed).items():
            assert largest_difference(group, values(straight)[key]) <= 1e-6, (key, after)


@pytest.mark.slow
def test_data_that_end_leave_a_whole_step(mirrored, tmp_path, caplog):
    """23 batches in calls of 10 steps: the 24th must leave no trace, in no variable."""

    class Finite(GlobalBatches):
        def __init__(self, dataset):
            super().__init__(dataset, training=False)

    features, labels = examples(23 * BATCH)
    batches = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH)
    wakes = []
    loop = fresh(
        mirrored(2),
        tmp_path,
        data=Finite(batches),
        steps_per_loop=10,
        actions=[lambda status: wakes.append((status.step, status.until, status.final))],
    )
    loop.train(10)
    loop.save(wait=True)
    scalars = loop.train(30)
    assert wakes == [(10, 10, True), (20, 30, False), (23, 23, True)]
    assert "ended after step 23 of 30" in caplog.text
    assert np.isfinite(scalars["loss"]) and scalars["loss"] > 0
    ended = bits(loop)
    loop.restore()
    loop.train(23)  # and asks for no more
    loop.checkpoints.close()
    assert_same(ended, bits(loop))


def test_data_that_end_hide_no_divergence():
    """The losses of the call that finds the end are not known, so its weights are looked at."""
    features, labels = examples(23 * BATCH)
    features[-3 * BATCH :] = np.nan

    def ending(features):
        return GlobalBatches(
            tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH), training=False
        )

    loop = make_loop(data=ending(features), steps_per_loop=10)
    with pytest.raises(DivergedError, match="is not finite at step 23; "):
        loop.train(30)
    windows = []
    log = Every(lambda s: (windows.append(s.scalars()), s.reset()), steps=10)
    whole = ending(examples(23 * BATCH)[0])
    loop = make_loop(data=whole, steps_per_loop=10, actions=[log])
    assert "loss" not in loop.train(30)  # of the steps after the last record, which none knows
    assert [("loss" in window) for window in windows] == [True, True, False]


def test_a_run_is_not_mixed_with_another(tmp_path):
    first = make_loop(directory=tmp_path)
    first.train(3)
    first.save(wait=True)
    first.checkpoints.close()
    again = make_loop(directory=tmp_path)
    with pytest.raises(UsageError, match="holds a run up to step 3: call restore"):
        again.train(3)
    assert again.global_step == 0
    again.restore()
    again.train(5)
    again.save(wait=True)
    assert again.checkpoints.latest().step == 5


@pytest.mark.parametrize("in_blocks", [True, False])
def test_after_a_step_that_failed_restore_goes_on_with_the_same_batches(tmp_path, in_blocks):
    """The step fails while the call runs, so some of its batches were taken from the feed."""

    class FailsAt(TrainStep):
        limit = tf.Variable(10**6, dtype=tf.int64, trainable=False)

        def loss(self, batch):
            with tf.control_dependencies([tf.debugging.assert_less(self.global_step, self.limit)]):
                return super().loss(batch)

    arrays = examples(EXAMPLES)
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=True)
    weights = []
    for limit in (10**6, 14):
        data = InMemory(arrays, global_batch_size=BATCH) if in_blocks else GlobalBatches(dataset)
        loop = make_loop(
            step_class=FailsAt, data=data, directory=tmp_path / f"{limit}", seed=1, steps_per_loop=8
        )
        loop.train(10)
        loop.save(wait=True)
        loop.step.limit.assign(limit)
        if limit == 14:
            with pytest.raises(tf.errors.InvalidArgumentError):
                loop.train(20)
            loop.step.limit.assign(10**6)
            loop.restore()
        loop.train(20)
        loop.checkpoints.close()
        weights.append(loop.step.model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_resume_with_other_data_is_refused(tmp_path):
    """The data that a resume compares are those of the loop; the first save has what they are."""

    def loop(data, **options):
        model = keras.Sequential([keras.layers.Input([FEATURES]), keras.layers.Dense(CLASSES)])
        checkpoints = CheckpointManager(tmp_path, **options)
        return Loop(TrainStep(model, keras.optimizers.SGD(0.1)), data, checkpoints=checkpoints)

    def own(seed, count=EXAMPLES):
        pairs = tf.data.Dataset.from_tensor_slices(examples(count))
        return pairs.shuffle(64, seed=seed).batch(BATCH)

    def resumed(data, **options):
        found = loop(data, **options)
        with found.checkpoints:
            return found.restore()

    tf.random.set_seed(None)
    first = loop(own(1))
    with first.checkpoints:
        first.save(wait=True)
    assert resumed(own(1)).step == 0
    with pytest.raises(CheckpointError, match="shuffle was .*, is 'without a seed: another order"):
        resumed(own(None))
    with pytest.raises(CheckpointError, match=r"another run: shuffle was .*soft_keys=\['tensorf"):
        resumed(own(2))
    assert resumed(own(2), soft_keys=["shuffle"]).step == 0
    with pytest.raises(
        CheckpointError, match="the first examples of .* have changed .*; shuffle was"
    ):
        resumed(tf.data.Dataset.from_tensor_slices(examples(EXAMPLES)).skip(1).batch(BATCH))
    with pytest.raises(CheckpointError, match=r"content was '\(absent\)', is "):
        resumed(InMemory(examples(EXAMPLES), global_batch_size=BATCH, seed=5))


@pytest.mark.slow
def test_a_resume_in_the_same_process_has_the_batches_of_a_new_one(tmp_path, mirrored):
    """A shuffle that was read has other seeds. The resume is in the second epoch."""
    rows: list[list[int]] = []

    class Seen(TrainStep):
        def loss(self, batch):
            context = tf.distribute.get_replica_context()
            if context.replica_id_in_sync_group == 0:
                tf.numpy_function(lambda x: rows.append(x[:, 0].tolist()), [batch[0]], [])
            return super().loss(batch)

    numbers = np.arange(24, dtype=np.float32)[:, None] * np.ones([1, FEATURES], np.float32)
    own = tf.data.Dataset.from_tensor_slices((numbers, np.zeros(24, np.int64)))
    own = own.shuffle(24, seed=1).batch(8, drop_remainder=True)
    strategy = mirrored(2)
    loop = make_loop(strategy, step_class=Seen, data=own, directory=tmp_path, jit_compile=False)
    with loop.checkpoints:
        loop.train(5)
        loop.save(wait=True)
        loop.train(9)
        expected = rows[5:]
        for _ in range(2):
            rows.clear()
            assert loop.restore().step == 5
            loop.train(9)
            assert rows == expected


def test_augmented_batches_that_are_opened_again_are_those_of_a_new_process():
    images = tf.data.Dataset.from_tensor_slices((np.zeros([8, 4, 4, 1], np.uint8), np.arange(8)))
    own = GlobalBatches(images.shuffle(8, seed=1).batch(4, drop_remainder=True))
    step: Any = None  # opening needs none
    steps, readings = Steps(step, Augmented(own, "flip"), tf.distribute.get_strategy()), []
    for _ in range(2):
        feed = steps.open(0)
        readings.append([tf.nest.flatten(next(feed.iterator))[-1].numpy().tolist() for _ in "1234"])
    assert readings[0] == readings[1] and readings[0][:2] != readings[0][2:]


def test_a_cell_that_makes_a_loop_runs_twice(tmp_path):
    """With a manager of an earlier cell, then with one of its own, which takes over."""
    loop = make_loop(directory=tmp_path)
    loop.train(4)
    loop.save(wait=True)
    manager = loop.checkpoints
    other = InMemory(examples(EXAMPLES, seed=1), global_batch_size=BATCH)
    with pytest.raises(
        CheckpointError,
        match="another run: the content of .* has changed since then; use the same arguments",
    ):
        make_loop(data=other, checkpoints=manager).restore()
    for step in (4, 6):
        loop = make_loop(checkpoints=manager)
        with pytest.raises(UsageError, match=rf"up to step {step}: call restore\(\) to continue"):
            loop.train(8)
        assert loop.restore().step == step
        loop.train(step + 2)
        loop.save(wait=True)
        assert [saved.step for saved in manager.all()] == [4, 6, 8][: step // 2]
        manager = CheckpointManager(tmp_path)
    directory = manager.directory
    del loop, manager
    Lock(directory / ".lock").release()  # deleting them has freed it
