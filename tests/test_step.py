"""N replicas equal one replica equal plain Keras, on the same global batches."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    PARTIAL,
    STEPS,
    adam,
    assert_replicas_agree,
    both,
    cut,
    examples,
    largest_difference,
    make_loop,
    mlp,
    plain_keras,
    sgd,
    train,
)

from ctl.data import InMemory
from ctl.distributed.replicas import offset_dropout_seeds
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.losses import cross_entropy
from ctl.phases.optimizers import PROVEN
from ctl.step import TrainStep

# Rates at which 20 steps move the weights by 0.01 to 1: an update left out would be seen.
RATES = {"Adadelta": 1.0, "Ftrl": 0.05, "SGD": 0.1, "Lion": 1e-3, "Muon": 2e-3}


def of_kind(kind):
    return lambda: kind(learning_rate=RATES.get(kind.__name__, 0.01))


class OfEach(TrainStep):
    """Sums the losses of all outputs of its model, so that each network trains as if alone."""

    def loss(self, batch):
        features, labels = batch
        return tf.add_n([cross_entropy(labels, one) for one in self.model(features, training=True)])


@pytest.mark.slow
@pytest.mark.compiled_update
def test_every_optimizer_equals_plain_keras(mirrored):
    """On 2 replicas, each of which updates as one does alone, after a sum. Each optimizer has a
    network of its own, in one step."""
    with mirrored(2).scope():
        inputs, networks = keras.Input([FEATURES]), [mlp() for _ in PROVEN]
        optimizers = [of_kind(kind)() for kind in PROVEN]
        model = keras.Model(inputs, [network(inputs) for network in networks])
        step = OfEach(model, [*zip(optimizers, networks, strict=True)])
    before = [network.get_weights() for network in networks]
    data = tf.data.Dataset.from_tensor_slices(examples()).batch(BATCH, drop_remainder=True)
    Loop(step, data, strategy=mirrored(2)).train(STEPS)
    for kind, ours, optimizer, weights in zip(PROVEN, networks, optimizers, before, strict=True):
        name, theirs, reference = kind.__name__, mlp(), of_kind(kind)()
        theirs.set_weights(weights)
        plain_keras(theirs, reference, cut(examples()))
        assert_replicas_agree(mirrored(2), ours.trainable_variables)
        assert largest_difference(ours.get_weights(), weights) > 5e-3, name
        assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6, name
        slots, wanted = (
            np.concatenate([np.ravel(v.numpy()) for v in one.variables])
            for one in (optimizer, reference)
        )
        np.testing.assert_allclose(slots, wanted, rtol=1e-5, atol=2e-6, err_msg=name)


def excluding(*words: str):
    def adamw():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
        optimizer.exclude_from_weight_decay(var_names=[*words])
        return optimizer

    return adamw


def by_layer(**options):
    """Muon for the first layer, Adam for the head and the biases, each with a weight decay."""

    def muon():
        decays = {"weight_decay": 0.3, "adam_weight_decay": 0.1, "exclude_layers": ["head"]}
        optimizer = keras.optimizers.Muon(0.002, **decays, **options)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    return muon


def nadam(**options):
    return lambda: keras.optimizers.Nadam(0.005, **options)


def with_head() -> keras.Model:
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(CLASSES, name="head")]
    return keras.Sequential([keras.Input([FEATURES]), *layers])


def embedding() -> keras.Model:
    words = keras.Input([6], dtype="int32")
    layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    return keras.Sequential([words, *layers])


def with_duplicate_rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    words = random.integers(0, 7, (STEPS * BATCH, 6)).astype(np.int32)
    return words, random.integers(0, CLASSES, STEPS * BATCH)


def weighted() -> tuple[np.ndarray, ...]:
    """Half of the weights are 0, so replicas differ in their number of valid examples."""
    weights = np.random.default_rng(2).integers(0, 2, STEPS * BATCH).astype(np.float32)
    return *examples(), weights


def frozen() -> keras.Model:
    model = mlp()
    model.layers[0].trainable = False
    return model


# Keras clips before it reduces, so it is one device that clips.
CLIPPED = {"optimizer": sgd(0.5), "reference": sgd(0.5, global_clipnorm=0.05), "clip_norm": 0.05}
# The last batch of the 20 has 5 examples: on 4 replicas 2, 2, 1 and none.
PARTIALLY = {"arrays": functools.partial(examples, PARTIAL), "full": False}

# Each feature: the numbers of replicas, and what `both` is given; by default Adam.
QUICK: dict[str, tuple[tuple[int, ...], dict]] = {
    "momentum": ((2,), {"optimizer": sgd(0.05, momentum=0.9)}),
    "nesterov": ((2,), {"optimizer": sgd(0.05, momentum=0.9, nesterov=True)}),
    "clipping by global norm after the reduction": ((1, 4), CLIPPED),
    "weight decay of any optimizer": ((2,), {"optimizer": sgd(0.1, weight_decay=0.1)}),
    "schedule": ((2,), {"schedule": lambda s: 0.01 * 0.9 ** tf.cast(s, "float32")}),
    "constraint": (
        (2,),
        {
            "optimizer": sgd(0.5),
            "model": lambda: mlp(kernel_constraint=keras.constraints.MaxNorm(0.5)),
        },
    ),
    "regularizer counts once": (
        (1, 2),
        {"optimizer": sgd(), "model": lambda: mlp(kernel_regularizer=keras.regularizers.L2(0.05))},
    ),
    "weighted examples": ((2,), {"optimizer": sgd(), "arrays": weighted}),
}
SLOW: dict[str, tuple[tuple[int, ...], dict]] = {
    # 3 does not divide a replica's batch: micro-batches of different sizes.
    "accumulation of 3": ((2,), {"accumulate_steps": 3}),
    # One is in the name of a `tf.Variable`. The other, that of a Keras variable, excludes none.
    "weight decay without a kernel": (
        (2,),
        {"optimizer": excluding("head/kernel", "^bias$"), "model": with_head},
    ),
    "sparse gradients with duplicate rows": (
        (2,),
        {"arrays": with_duplicate_rows, "model": embedding},
    ),
    "partial batches in several packs": (  # the last has one example
        (2,),
        {
            "optimizer": sgd(),
            "arrays": functools.partial(examples, PARTIAL - 4),
            "full": False,
            "bytes_per_pack": 200,
        },
    ),
    "partial batches with accumulation and clipping": (
        (4,),
        {**CLIPPED, **PARTIALLY, "accumulate_steps": 2},
    ),
    "Muon by layer": ((2,), {"optimizer": by_layer(), "model": with_head}),
    "Nadam, clipped, of micro-batches": (
        (2,),
        {
            "optimizer": nadam(weight_decay=0.1),
            "reference": nadam(weight_decay=0.1, global_clipnorm=0.05),
            "clip_norm": 0.05,
            "accumulate_steps": 2,
            "on_nan": "skip",
        },
    ),
    "frozen layers": ((2,), {"model": frozen}),
    # On one replica, see `test_all_of_the_step_compiled_equals_plain_keras`.
    "compiled with accumulation": ((2,), {"jit_compile": True, "accumulate_steps": 2}),
}
ADAM = adam()
# Features of the update, which is compiled in these; the others are those of what comes before it.
OF_THE_UPDATE = {
    *("momentum", "nesterov", "weight decay of any optimizer", "weight decay without a kernel"),
    *("schedule", "constraint", "Muon by layer", "Nadam, clipped, of micro-batches"),
}


def each_feature() -> list:
    found = []
    for name, (replicas, case) in (QUICK | SLOW).items():
        marks = [pytest.mark.slow] if name in SLOW else []
        marks += [pytest.mark.compiled_update] if name in OF_THE_UPDATE else []
        found += [pytest.param(n, case, id=f"{name}, {n}", marks=marks) for n in replicas]
    return found


@pytest.mark.parametrize(("replicas", "case"), each_feature())
def test_each_feature_equals_keras_on_one_device(mirrored, replicas, case):
    options = dict(case)
    make_model, arrays = options.pop("model", mlp), options.pop("arrays", examples)()
    optimizer = options.pop("optimizer", ADAM)
    ours, theirs, *_ = both(mirrored(replicas), optimizer, arrays, make_model=make_model, **options)
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        if not mine.trainable:
            np.testing.assert_equal(mine.get_weights(), other.get_weights())


def schedule_free(**options):
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", keras.optimizers.Adam)  # of a later Keras
    return lambda: kind(0.005, weight_decay=0.1, **options)


@pytest.mark.slow
@pytest.mark.compiled_update
@pytest.mark.parametrize("make", [adam, schedule_free])
def test_averaged_weights_equal_those_of_keras(mirrored, make):
    averaged = make(use_ema=True, ema_momentum=0.9)
    ours, theirs, loop, reference = both(mirrored(2), make(), reference=averaged, ema_decay=0.9)
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6
    averages = reference._model_variables_moving_average
    assert largest_difference(loop.step.updater.ema, averages) <= 1e-6
    trained = ours.get_weights()
    with loop.step.updater.averaged():
        assert largest_difference(ours.get_weights(), averages) <= 1e-6
    assert largest_difference(ours.get_weights(), trained) == 0


@pytest.mark.slow
@pytest.mark.compiled_update
@pytest.mark.parametrize(
    "options",
    [{"ema_decay": 0.9, "on_nan": "skip"}, {"accumulate_steps": 2, "loss_scale": True}],
    ids=" and ".join,
)
def test_all_of_the_step_compiled_equals_plain_keras(options):
    default = tf.distribute.get_strategy()
    ours, theirs, loop, _ = both(default, ADAM, jit_compile=True, **options)
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6
    functions = loop.traced().graph.as_graph_def().library.function
    (body,) = (f.node_def for f in functions if any("IteratorGetNext" in n.op for n in f.node_def))
    assert sum(node.attr["_XlaMustCompile"].b for node in body) == 1  # forward, update and all


def masks(strategy, model) -> np.ndarray:
    """What Dropout lets through on each replica, [replicas, 64]."""
    ones = tf.ones([1, 64])
    results = strategy.run(tf.function(lambda: model(ones, training=True)))
    return np.concatenate([r.numpy() for r in strategy.experimental_local_results(results)])


def test_dropout_masks_differ_between_replicas(mirrored):
    strategy = mirrored(4)
    with strategy.scope():
        parts = [keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input([64]), *parts])
        dropout = keras.Sequential(model.layers[:1])
        step = TrainStep(model, keras.optimizers.SGD(0.1))
    assert len(np.unique(masks(strategy, dropout), axis=0)) == 1  # what Keras does
    step.build(strategy)
    assert len(np.unique(masks(strategy, dropout), axis=0)) == 4
    for _ in range(2):
        offset_dropout_seeds(strategy, model)
    assert len(np.unique(masks(strategy, dropout), axis=0)) == 4


def test_cross_entropy_of_probabilities_and_with_smoothing_equals_keras():
    logits = tf.random.stateless_normal([8, CLASSES], [1, 2])
    labels = tf.range(8) % CLASSES
    theirs = keras.losses.categorical_crossentropy(
        tf.one_hot(labels, CLASSES), logits, from_logits=True, label_smoothing=0.1
    )
    np.testing.assert_allclose(cross_entropy(labels, logits, 0.1), theirs, rtol=1e-6)
    probabilities = tf.nn.softmax(tf.random.stateless_normal([8, CLASSES], [3, 4]))
    for smoothing in (0.0, 0.1):
        theirs = keras.losses.categorical_crossentropy(
            probabilities, logits, from_logits=True, label_smoothing=smoothing
        )
        ours = cross_entropy(probabilities, logits, smoothing)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def collectives(loop) -> list[tf.Operation]:
    definition = loop.traced().graph.as_graph_def()
    bodies = [definition.node, *(f.node_def for f in definition.library.function)]
    return [node for body in bodies for node in body if node.op.startswith("Collective")]


@pytest.mark.parametrize(
    ("options", "packs"),
    [
        ({"clip_norm": 1.0, "accumulate_steps": 2, "ema_decay": 0.9, "loss_scale": True}, 1),
        ({"full": False}, 1),
        ({"bytes_per_pack": 200}, 3),
    ],
    ids=["everything", "counted", "packs"],
)
def test_one_gradient_collective_per_device_per_step(ring2, options, packs):
    loop = train(ring2, mlp, adam(), examples(), steps=3, **options)
    found = collectives(loop)
    assert [node.op for node in found] == ["CollectiveReduceV2"] * (2 * packs)
    names = {node.name.split("ctl_all_reduce/")[1].split("/")[0] for node in found}
    assert names == {f"pack{i}" for i in range(packs)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(
            lambda: keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD()),
            ["MultiOptimizer", "parameter groups"],
            marks=pytest.mark.skipif(
                not hasattr(keras.optimizers, "MultiOptimizer"), reason="needs a newer Keras"
            ),
        ),
        (lambda: keras.optimizers.Muon(use_ema=True), ["use_ema", "ema_decay"]),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            ["LossScaleOptimizer", "inner"],
        ),
        (lambda: keras.optimizers.SGD(clipnorm=1.0), ["clipnorm", "clip_norm"]),
        (lambda: keras.optimizers.SGD(clipvalue=1.0), ["clipvalue", "TrainStep.clip"]),
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), ["global_clipnorm", "clip_norm"]),
        (lambda: keras.optimizers.SGD(use_ema=True), ["use_ema", "ema_decay"]),
        (lambda: keras.optimizers.SGD(loss_scale_factor=2.0), ["loss_scale_factor"]),
        (
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            ["gradient_accumulation_steps", "accumulate_steps"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_right_is_refused(mirrored, make, words):
    strategy = mirrored(1)
    with strategy.scope():
        step = TrainStep(mlp(), make())
    with pytest.raises(UsageError) as error:
        step.build(strategy)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_variables_of_another_scope_are_refused(mirrored):
    step = TrainStep(mlp(), keras.optimizers.SGD())
    with pytest.raises(UsageError, match=r"strategy.scope\(\)"):
        step.build(mirrored(2))


FORMS = {
    "one tensor": (lambda x: x, lambda batch: batch),
    "a dictionary": (lambda x: {"id": x[:, 0], "x": x}, lambda batch: batch["x"]),
    "four": (lambda x: (x[:, 0], x[:, 1], {"x": (x,)}, x), lambda batch: batch[2]["x"][0]),
}


@pytest.mark.parametrize(
    ("form", "accumulate_steps"), [("one tensor", 1), ("a dictionary", 2), ("four", 2)]
)
def test_a_step_that_overrides_one_phase(mirrored, form, accumulate_steps):
    """A step of one's own: the loss only, no outputs for metrics, a batch of any form, of which
    each row counts 1. The last batch is smaller."""
    make, read = FORMS[form]

    class Autoencoder(TrainStep):
        def loss(self, batch):
            x = read(batch)
            return tf.reduce_mean((self.model(x, training=True) - x) ** 2, -1)

    def model():
        return keras.Sequential([keras.layers.Input([FEATURES]), keras.layers.Dense(FEATURES)])

    data = tf.data.Dataset.from_tensor_slices(make(examples(PARTIAL)[0])).batch(BATCH)
    options = {"data": data, "optimizer": sgd(0.5), "accumulate_steps": accumulate_steps}
    results, losses = [], []
    for replicas in (1, 2):
        loop = make_loop(mirrored(replicas), model=model, step_class=Autoencoder, seed=0, **options)
        before = loop.step.model.get_weights()
        losses.append(loop.train(STEPS + 1)["loss"])
        results.append(loop.step.model.get_weights())
    assert largest_difference(*results) <= 1e-6
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert largest_difference(results[0], before) > 1e-2


class Subclassed(keras.Model):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm, self.drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
        self.head = keras.layers.Dense(CLASSES)

    def call(self, inputs, training=False):
        x = inputs["x"] if self.kind == "dictionary" else inputs
        return self.head(self.drop(self.norm(x), training=training))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequential", "dictionary"])
def test_a_model_that_is_not_built_equals_one_that_its_owner_built(mirrored, kind):
    """It is built from the first batch's spec, with the same numbers for its weights and masks."""
    x, y = examples(40)
    features = {"x": x} if kind == "dictionary" else x
    data = InMemory((features, y), global_batch_size=8)
    if kind == "sequential":
        data = tf.data.Dataset.from_tensor_slices((features, y)).batch(8).repeat()
    results = []
    for built in (True, False):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        with mirrored(2).scope():
            made = Subclassed(kind)
            if kind == "sequential":
                made = keras.Sequential([made.norm, made.drop, made.head])
            if built:
                made({"x": x[:1]} if kind == "dictionary" else x[:1])
        held_out = 0 if kind == "dictionary" else 8  # then the evaluator builds it
        loop = make_loop(mirrored(2), model=lambda made=made: made, data=data, evaluate=held_out)
        loop.train_and_evaluate(4, evaluate_every=2) if held_out else loop.train(4)
        results.append(loop.step.model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_that_ctl_cannot_build_is_refused():
    class Own(TrainStep):
        def loss(self, batch):
            return tf.reduce_mean(self.model(batch["x"]) ** 2, -1)

    data = tf.data.Dataset.from_tensor_slices({"x": examples()[0]}).batch(8)
    with pytest.raises(UsageError, match="if it is not built, call it on one batch of features"):
        make_loop(model=lambda: Subclassed("tensor"), step_class=Own, data=data)
