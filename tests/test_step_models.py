"""A step with several models: which optimizer trains which; what is saved, averaged, restored."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.base.models import Models
from ctl.errors import CheckpointError, UsageError

BATCH, FEATURES = 8, 4


def models() -> dict[str, keras.Model]:
    generator = [keras.Input([3]), keras.layers.Dense(FEATURES, "tanh")]
    discriminator = [keras.Input([FEATURES]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    return {"g": keras.Sequential(generator), "d": keras.Sequential(discriminator)}


def losses_of(models, batch) -> dict[str, tf.Tensor]:
    noise, real = batch
    on_fake = models["d"](models["g"](noise, training=True), training=True)[:, 0]
    on_real = models["d"](real, training=True)[:, 0]
    return {
        "g": tf.nn.softplus(-on_fake),
        "d": tf.nn.softplus(on_fake) + tf.nn.softplus(-on_real),
    }


class Evaluation(ctl.EvalStep):
    def loss(self, batch):
        losses = losses_of(self.model, batch)
        self.log("g", losses["g"])
        return losses


class Adversarial(ctl.TrainStep):
    """Both losses of one forward pass."""

    eval_step = Evaluation

    def loss(self, batch):
        return losses_of(self.model, batch)


class InTurns(Adversarial):
    def attach(self, loop):
        super().attach(loop)
        loop.actions.insert(0, ctl.actions.Turns(loop, [("d", 2), ("g", 1)]))


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = (8 * BATCH, 3), (8 * BATCH, FEATURES)
    return tuple(random.normal(size=shape).astype("float32") for shape in shapes)  # type: ignore


def optimizers() -> dict[str, keras.optimizers.Optimizer]:
    return {"g": keras.optimizers.SGD(0.2), "d": keras.optimizers.SGD(0.1, momentum=0.9)}


def make(strategy=None, checkpoints=None, kind=Adversarial, **options) -> ctl.Loop:
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        step = kind(models(), optimizers(), **options)
    return ctl.Loop(
        step, data(), global_batch_size=BATCH, strategy=strategy, checkpoints=checkpoints
    )


def bits(loop: ctl.Loop, name: str) -> list[bytes]:
    return [v.numpy().tobytes() for v in loop.step.model[name].variables]


def reference(model: Models, batches: list) -> None:
    """Plain TensorFlow: both gradients of a batch, then both updates."""
    trained = optimizers()
    for batch in batches:
        with tf.GradientTape(persistent=True) as tape:
            means = {name: tf.reduce_mean(x) for name, x in losses_of(model, batch).items()}
        found = {
            name: tape.gradient(means[name], [v.value for v in one.trainable_variables])
            for name, one in model.items()
        }
        for name, one in model.items():
            trained[name].apply(found[name], one.trainable_variables)


@pytest.mark.slow
def test_it_is_right():
    """N replicas equal one, a resume changes no bit, and the numbers are those of plain
    TensorFlow."""
    testing.check_step(make, replicas=(2,), reference=reference)


@pytest.mark.slow
def test_turns_are_taken_on_replicas_and_after_a_resume():
    def taking_turns(strategy, checkpoints):
        return make(strategy, checkpoints, InTurns, ema_decay=0.5)

    testing.check_replicas_equal_one(taking_turns, 2, steps=5)
    testing.check_resumed(taking_turns, 2, steps=5)


def test_models_train_in_turns():
    loop, moved = make(kind=InTurns), []
    for step in range(1, 8):
        before = {name: bits(loop, name) for name in "dg"}
        loop.train(step)
        moved.append("".join(name for name in "dg" if bits(loop, name) != before[name]))
    assert moved == ["d", "d", "g"] * 2 + ["d"]
    assert loop.steps.run.experimental_get_tracing_count() == 2


def test_a_model_trains_alone_by_its_name():
    loop = make()
    before = {name: bits(loop, name) for name in "dg"}
    loop.train_only("g")
    loop.train(2)
    assert bits(loop, "d") == before["d"] and bits(loop, "g") != before["g"]
    loop.train_only(["d", loop.step.model["g"]])
    loop.train(3)
    assert bits(loop, "d") != before["d"]
    with pytest.raises(UsageError, match="did you mean"):
        loop.train_only(["gg"])


def test_one_optimizer_trains_all():
    class Autoencoder(ctl.TrainStep):
        def loss(self, batch):
            noise, real = batch
            made = self.model["g"](noise, training=True)
            return tf.reduce_sum((made - real) ** 2, -1) + self.model["d"](made)[:, 0] ** 2

    with pytest.raises(UsageError, match="give TrainStep.model=, optimizer=. dicts"):
        kind = Adversarial(models(), "sgd")
        ctl.Loop(kind, data(), global_batch_size=BATCH).train(1)
    loop = ctl.Loop(Autoencoder(models(), "sgd"), data(), global_batch_size=BATCH)
    before = {name: bits(loop, name) for name in "dg"}
    loop.train(1)
    assert all(bits(loop, name) != before[name] for name in "dg")


def test_each_has_a_schedule():
    halved = ctl.schedule.Piecewise([2], [0.2, 0.1])
    step = Adversarial(models(), {"d": ("sgd", halved), "g": keras.optimizers.SGD(0.5)})
    loop = ctl.Loop(step, data(), global_batch_size=BATCH, steps_per_loop=1)
    scalars = loop.train(3)
    rates = [scalars["learning_rate"], scalars["learning_rate_2"]]  # sorted by name
    assert rates == pytest.approx([0.1, 0.5])


def test_a_frozen_teacher_needs_no_optimizer():
    class Distilled(ctl.TrainStep):
        def loss(self, batch):
            wanted = self.model["teacher"](batch[1])
            return {"student": (self.model["student"](batch[1]) - wanted)[:, 0] ** 2}

    made = {"teacher": models()["d"], "student": models()["d"]}
    made["teacher"].trainable = False
    with pytest.raises(UsageError, match="model 'teacher' has nothing to train: leave its opt"):
        Distilled(made, {"student": "sgd", "teacher": "sgd"})
    loop = ctl.Loop(
        Distilled(made, {"student": "sgd"}, ema_decay=0.9), data(), global_batch_size=BATCH
    )
    before = {name: bits(loop, name) for name in made}
    loop.train(1)
    assert [bits(loop, name) != before[name] for name in made] == [False, True]
    assert "ema_teacher" not in loop.step.state()


def test_a_model_is_frozen_by_its_name():
    model = Models(models())
    frozen = ctl.freezing.freeze(model, ["g"])
    assert frozen == [v.path for v in model["g"].weights]
    assert all(one.trainable_variables == [] for name, one in model.items() if name == "g")
    assert model["d"].trainable_variables


def test_averages_of_each_are_evaluated(tmp_path):
    loop = make(ema_decay=0.5, checkpoints=tmp_path)
    loop.evaluator = ctl.Evaluator(Evaluation(loop.step.model), (data()[0], data()[1]))
    weights = []
    for step in range(1, 4):
        loop.train(step)
        weights.append([v.numpy() for v in loop.step.model.trainable_variables])
    averages = weights[0]  # as Keras, after the first update
    for later in weights[1:]:
        averages = [0.5 * a + 0.5 * w for a, w in zip(averages, later, strict=True)]
    results = loop.evaluate()
    made = Models(models())
    made.set_weights(averages)
    losses = losses_of(made, data())
    assert results["g"] == pytest.approx(float(tf.reduce_mean(losses["g"])), rel=1e-5)
    total = float(tf.reduce_mean(losses["g"] + losses["d"]))
    assert results["loss"] == pytest.approx(total, rel=1e-5)


def test_a_checkpoint_has_each_under_its_name(tmp_path):
    loop = make(ema_decay=0.5, checkpoints=tmp_path)
    loop.train(2)
    loop.save(wait=True)
    reader = ctl.checkpoint.Reader(tmp_path)
    groups = dict.fromkeys(tensor.group for tensor in reader.tensors.values())
    of_models = ["ema_d", "ema_g", "model_d", "model_g"]
    assert sorted(groups) == ["counters", *of_models[:2], *of_models[2:], "optimizer"]
    kernel = loop.step.model["g"].layers[0].kernel
    name = next(n for n in reader if n.startswith("model_g/") and n.endswith("kernel"))
    np.testing.assert_array_equal(reader[name], kernel)
    alone = {"model_g": [v.value for v in models()["g"].variables]}
    ctl.CheckpointManager(tmp_path, read_only=True).restore(alone)
    np.testing.assert_array_equal(alone["model_g"][0], kernel)


def test_the_order_of_the_dict_does_not_matter(tmp_path):
    loop = make(checkpoints=tmp_path, ema_decay=0.5)
    loop.train_only("g")
    loop.train(2)
    loop.save(wait=True)
    made = dict(reversed(models().items()))
    step = Adversarial(made, dict(reversed(optimizers().items())), ema_decay=0.5)
    again = ctl.Loop(step, data(), global_batch_size=BATCH, checkpoints=tmp_path)
    again.restore()
    assert again.step.trainable_mask == loop.step.trainable_mask
    for one in (loop, again):
        one.train(4)
    assert all(bits(loop, name) == bits(again, name) for name in "dg")


def test_another_name_is_refused(tmp_path):
    loop = make(checkpoints=tmp_path)
    loop.train(1)
    loop.save(wait=True)

    class Renamed(Adversarial):
        def loss(self, batch):
            return losses_of({"g": self.model["g"], "d": self.model["critic"]}, batch)

    Renamed.__qualname__ = Adversarial.__qualname__
    made = models()
    step = Renamed({"g": made["g"], "critic": made["d"]}, {"g": "sgd", "critic": "sgd"})
    again = ctl.Loop(step, data(), global_batch_size=BATCH, checkpoints=tmp_path)
    with pytest.raises(CheckpointError, match="it has no 'model_critic', only model_d, model_g"):
        again.restore()


def test_a_second_model_may_be_an_attribute(tmp_path):
    """As before there were dicts of models: the groups of the checkpoint are the same."""

    class Attribute(ctl.TrainStep):
        def __init__(self, generator, discriminator):
            groups = [(optimizers()["g"], generator), (optimizers()["d"], discriminator)]
            super().__init__(generator, groups)
            self.discriminator = discriminator

        def loss(self, batch):
            return [*losses_of({"g": self.model, "d": self.discriminator}, batch).values()]

    def made():
        pair = models()
        step = Attribute(pair["g"], pair["d"])
        return ctl.Loop(step, data(), global_batch_size=BATCH, checkpoints=tmp_path)

    loop = made()
    loop.train(2)
    loop.save(wait=True)
    assert [*loop.step.state()] == ["model", "step", "optimizer", "counters"]
    again = made()
    assert again.restore().step == 2
    for one in (loop, again):
        one.train(3)
    for ours, theirs in zip(loop.step.model.weights, again.step.model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_best_weights_are_those_of_all(tmp_path):
    manager = ctl.CheckpointManager(tmp_path, best_metric="loss")
    loop = make(ema_decay=0.5, checkpoints=manager)
    loop.train(1)
    best = {name: bits(loop, name) for name in "dg"}
    loop.save({"loss": 1.0}, wait=True)
    loop.train(3)
    loop.save({"loss": 2.0}, wait=True)
    assert loop.restore_best_weights().step == 1
    assert best == {name: bits(loop, name) for name in "dg"}


MISTAKES = {
    "model 'd' has no optimizer: add one, or": lambda: Adversarial(models(), {"g": "sgd"}),
    "unknown model 'e'": lambda: Adversarial(models(), {"g": "sgd", "d": "sgd", "e": "sgd"}),
    "optimizer is a dict, and model is one": lambda: Adversarial(models()["d"], {"d": "sgd"}),
    "the optimizer of model 'd' is .*: give": lambda: Adversarial(models(), {"g": "sgd", "d": 3}),
    "model is an empty dict": lambda: Adversarial({}, "sgd"),
    "its name must be a word": lambda: Adversarial({"a/b": models()["g"]}, "sgd"),
    "model 'g' is a function": lambda: Adversarial({"g": models}, "sgd"),
    "model 'g' is not built": lambda: Adversarial(
        {"g": keras.Sequential([keras.layers.Dense(1)])}, "sgd"
    ),
    "TrainStep has the models d, g, and no loss": lambda: ctl.TrainStep(models(), "sgd"),
    "EvalStep has the models d, g, and no loss": lambda: ctl.EvalStep(models()),
    "unknown model 'h'": lambda: Adversarial(models(), "sgd").model["h"],
    "holds the models d, g: call one of them": lambda: Adversarial(models(), "sgd").model(3),
    "holds the models d, g: save each": lambda: Adversarial(models(), "sgd").model.save("a.keras"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_line(message):
    with pytest.raises(UsageError, match=message):
        MISTAKES[message]()


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (
            lambda losses: [*losses.values()],
            "a list of losses, .* a dict with one for each of d, g",
        ),
        (lambda losses: {"g": losses["g"]}, "returned losses of g: .* one for each of d, g"),
        (lambda losses: {**losses, "h": losses["g"]}, "returned losses of g, d, h: return a dict"),
    ],
)
def test_other_losses_are_refused(returns, message):
    class Other(Adversarial):
        def loss(self, batch):
            return returns(super().loss(batch))

    with pytest.raises(UsageError, match=message):
        make(kind=Other).train(1)


def test_layers_have_no_names_for_train_only_in_a_step_of_one_model():
    step = ctl.TrainStep(models()["d"], "sgd", "mean_squared_error")
    loop = ctl.Loop(step, (data()[1], data()[0][:, 0]), global_batch_size=BATCH)
    with pytest.raises(UsageError, match=r"train_only\('d'\): the step has one model: give layers"):
        loop.train_only(["d"])


def test_turns_are_whole_numbers():
    loop = make()
    for turns in ([("d", 0.5)], [("d", -1)], [("d", 0)], []):
        with pytest.raises(UsageError, match="^Turns"):
            ctl.actions.Turns(loop, turns)
    with pytest.raises(UsageError, match="unknown model 'gg'"):
        ctl.actions.Turns(loop, [("d", 5), ("gg", 1)])
    turns = ctl.actions.Turns(loop, [("d", 0), (None, 1), ("g", 3)])
    assert [turns.steps_until_due(step) for step in range(5)] == [1, 3, 2, 1, 1]
    assert all(loop.step.trainable_mask)
