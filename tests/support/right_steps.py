"""Methods of the literature as steps that are right on any number of replicas, for `ctl.testing`.

`RIGHT` has them by name. Each trains a tiny model.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, accuracy, examples
from keras import layers

from ctl import testing
from ctl.base.actions import Every
from ctl.data import InMemory
from ctl.loop import Loop
from ctl.phases import passes
from ctl.phases.losses import cross_entropy
from ctl.reduce import all_gather
from ctl.step import TrainStep

COUNT = 4 * BATCH
RATE = 0.1
WIDTH = 4


def model(*more: keras.Layer, features: int = FEATURES, outputs: int = CLASSES) -> keras.Model:
    parts = [layers.Dense(6, "tanh", name="first"), *more, layers.Dense(outputs, name="last")]
    return keras.Sequential([keras.Input([features]), *parts])


def numbers(*shape: int, seed: int = 7) -> np.ndarray:
    """Normal random numbers, the same in each call."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def chances(width: int) -> np.ndarray:
    return np.random.default_rng(9).uniform(size=[COUNT, width]).astype(np.float32)


class Method(NamedTuple):
    """A right step: the arguments of `maker`."""

    kind: type
    arrays: Any = None
    options: dict[str, Any] = {}

    def make(self):
        return maker(self.kind, self.arrays, **self.options)


def maker(kind=TrainStep, arrays=None, *, network=model, optimizer=None, metrics=(), **options):
    """The ``make`` of a step of ``kind`` that trains ``network()`` with SGD on ``arrays``, examples
    or a function that makes a dataset. ``optimizer`` gets the model; ``metrics`` are functions."""

    def make(strategy, checkpoints):
        with strategy.scope():
            net = network()
            trains = optimizer(net) if optimizer else keras.optimizers.SGD(RATE)
            step = kind(net, trains, metrics=[metric() for metric in metrics], **options)
        if callable(arrays):
            data = arrays()
        else:
            chosen = examples(COUNT) if arrays is None else arrays
            data = InMemory(chosen, global_batch_size=BATCH, seed=3)
        return Loop(step, data, strategy=strategy, checkpoints=checkpoints)

    return make


def update(change, *variables: tf.Variable) -> None:
    """Assigns ``change(*variables)`` to the first of them, alike on all replicas."""

    def merged(strategy):
        strategy.extended.update(
            variables[0], lambda v, *others: v.assign(change(v, *others)), args=variables[1:]
        )

    tf.distribute.get_replica_context().merge_call(merged)


def frozen_copy(of: keras.Model) -> keras.Model:
    copy = keras.models.clone_model(of)
    copy.set_weights(of.get_weights())
    copy.trainable = False
    return copy


def follow(copy: keras.Model, trained: keras.Model) -> None:
    """An exponential moving average."""
    for mine, other in zip(copy.variables, trained.variables, strict=True):
        update(lambda v, new: 0.9 * v + 0.1 * new, mine.value, other.value)


def unit(vectors: tf.Tensor) -> tf.Tensor:
    return tf.math.l2_normalize(vectors, axis=-1)


# Two views, and a network that follows ------------------------------------------------------------


def of_two() -> keras.Model:
    """Two networks, one after the other."""
    parts = [model(outputs=WIDTH), model(features=WIDTH, outputs=WIDTH)]
    return keras.Sequential([keras.Input([FEATURES]), *parts])


VIEWS = numbers(COUNT, FEATURES), numbers(COUNT, FEATURES, seed=8)


class BYOL(TrainStep):
    """Grill et al. 2020, arXiv:2006.07733, equation 2."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.target = frozen_copy(self.model.layers[0])

    def loss(self, batch):
        online, predictor = self.model.layers

        def distance(view, other):
            predicted = predictor(online(view, training=True), training=True)
            wanted = tf.stop_gradient(self.target(other))
            return 2.0 - 2.0 * tf.reduce_sum(unit(predicted) * unit(wanted), axis=-1)

        return distance(*batch) + distance(*batch[::-1])

    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        follow(self.target, self.model.layers[0])


class MoCo(TrainStep):
    """He et al. 2020, arXiv:1911.05722, algorithm 1: negatives from a queue of keys."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.encoder = frozen_copy(self.model)
        self.queue = self.variable("queue", [2 * BATCH, CLASSES])

    def loss(self, batch):
        queries = unit(self.model(batch[0], training=True))
        keys = tf.stop_gradient(unit(self.encoder(batch[1])))
        same = tf.reduce_sum(queries * keys, axis=-1, keepdims=True)
        logits = tf.concat([same, queries @ tf.transpose(self.queue)], axis=-1) / 0.5
        self.queue.assign(tf.concat([all_gather(keys), self.queue[:-BATCH]], axis=0))
        return cross_entropy(tf.zeros([tf.shape(keys)[0]], tf.int64), logits)

    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        follow(self.encoder, self.model)


class RDrop(TrainStep):
    """Liang et al. 2021, arXiv:2106.14448, equation 4."""

    def loss(self, batch):
        features, labels = batch
        one, two = (self.model(features, training=True) for _ in range(2))
        p, q = tf.nn.log_softmax(one), tf.nn.log_softmax(two)
        divergence = tf.reduce_sum((tf.exp(p) - tf.exp(q)) * (p - q), axis=-1)
        return self.loss_fn(labels, one) + self.loss_fn(labels, two) + divergence, one


# Other updates ------------------------------------------------------------------------------------


class Lookahead(TrainStep):
    """Zhang et al. 2019, arXiv:1907.08610, algorithm 1."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.slow = [tf.Variable(v.value, trainable=False) for v in self.model.trainable_variables]

    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        due = tf.equal(self.global_step % 2, 0)
        for slow, fast in zip(self.slow, self.trainable_variables, strict=True):
            update(lambda s, f: tf.where(due, s + 0.5 * (f - s), s), slow, fast)
            update(lambda f, s: tf.where(due, s, f), fast, slow)


class Muon(keras.optimizers.Optimizer):
    """Jordan et al. 2024: the momentum of a matrix is made orthogonal, wide side first."""

    def build(self, variables):
        super().build(variables)
        self.momenta = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momenta[self._get_variable_index(variable)]
        self.assign(momentum, 0.95 * momentum + gradient)
        x = keras.ops.convert_to_tensor(momentum)
        tall = x.shape[0] > x.shape[1]
        x = tf.transpose(x) if tall else x
        x /= tf.norm(x) + 1e-7
        for _ in range(5):
            a = x @ tf.transpose(x)
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        self.assign_sub(variable, learning_rate * (tf.transpose(x) if tall else x))


def muon_and_adamw(net: keras.Model) -> list:
    hidden = net.layers[0].kernel
    others = [v for v in net.trainable_variables if v is not hidden]
    return [(Muon(0.02), [hidden]), (keras.optimizers.AdamW(0.01), others)]


class PCGrad(TrainStep):
    """Yu et al. 2020, arXiv:2001.06782, algorithm 1, with two tasks: the class, and whether it is
    even. The gradients that conflict are those of the global batch."""

    def forward_backward(self, batch, count):
        features, labels = batch
        with tf.GradientTape(persistent=True) as tape:
            logits = self.model(features, training=True)
            losses = [
                tf.reduce_sum(cross_entropy(labels, logits[:, :CLASSES])),
                tf.reduce_sum(cross_entropy(labels % 2, logits[:, CLASSES:])),
            ]
            if isinstance(count, int):
                losses = [one / (count * self.strategy.num_replicas_in_sync) for one in losses]
        one, two = (passes.reduced(self, self.backward(tape, loss), count) for loss in losses)
        product = sum(tf.reduce_sum(a * b) for a, b in zip(one, two, strict=True))
        square_one, square_two = (sum(tf.reduce_sum(g * g) for g in task) for task in (one, two))
        conflict = tf.minimum(product, 0.0)
        projected = [
            a + b - conflict / square_two * b - conflict / square_one * a
            for a, b in zip(one, two, strict=True)
        ]
        # `reduce` sums this over replicas, and divides by the count if it is a tensor.
        share = 1.0 / self.strategy.num_replicas_in_sync if isinstance(count, int) else count
        return tf.add_n(losses), [g * share for g in projected]


# Two networks in turn -----------------------------------------------------------------------------


class WGANGP(TrainStep):
    """Gulrajani et al. 2017, arXiv:1704.00028, algorithm 1. The noise is a part of the data."""

    critic_steps = 2

    def attach(self, loop):
        super().attach(loop)
        generator, critic = self.model.layers

        def choose(step):
            last = step % (self.critic_steps + 1) == self.critic_steps
            loop.train_only([generator if last else critic])

        choose(0)
        loop.actions.append(Every(lambda status: choose(status.step), steps=1))

    def loss(self, batch):
        generator, critic = self.model.layers
        real, (noise, between) = batch
        fake = generator(noise, training=True)
        mixed = between * real + (1.0 - between) * fake
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            value = critic(mixed, training=True)
        slope = tf.norm(tape.gradient(value, mixed), axis=-1)
        on_fake, on_real = (critic(x, training=True)[:, 0] for x in (fake, real))
        return [-on_fake, on_fake - on_real + 10.0 * (slope - 1.0) ** 2]


def generator_and_critic() -> keras.Model:
    generator, critic = model(features=WIDTH, outputs=FEATURES), model(outputs=1)
    return keras.Sequential([keras.Input([WIDTH]), generator, critic])


def one_for_each(net: keras.Model) -> list:
    return [(keras.optimizers.SGD(RATE), part) for part in net.layers]


# Tasks, clients and examples ----------------------------------------------------------------------


def called(net: keras.Model, weights, features):
    """The outputs of ``net`` with other ``weights``."""
    others = [v.value for v in net.non_trainable_variables]
    return net.stateless_call(weights, others, features, training=True)[0]


def squared(net, weights, features, targets):
    return tf.reduce_mean((called(net, weights, features)[:, 0] - targets) ** 2)


class MAML(TrainStep):
    """Finn et al. 2017, arXiv:1703.03400, algorithm 2, with second derivatives. An example is a
    task: ``(features [2k, d], targets [2k])``, k to adapt with and k to be judged by."""

    inner_rate = 0.05

    def loss(self, batch):
        def of_task(task):
            features, targets = task
            k = features.shape[0] // 2
            weights = [tf.identity(v) for v in self.trainable_variables]
            with tf.GradientTape() as tape:
                tape.watch(weights)
                inner = squared(self.model, weights, features[:k], targets[:k])
            slopes = tape.gradient(inner, weights)
            adapted = [w - self.inner_rate * g for w, g in zip(weights, slopes, strict=True)]
            return squared(self.model, adapted, features[k:], targets[k:])

        return tf.map_fn(of_task, batch, fn_output_signature=tf.float32)


class FedAvg(TrainStep):
    """McMahan et al. 2017, arXiv:1602.05629, algorithm 1. An example is a client with its own
    examples, ``(features [k, d], targets [k])``. The server takes the mean of what the clients
    return: SGD with a rate of 1, on how far they went."""

    def loss_and_gradients(self, batch, divisor):
        start = [tf.identity(v) for v in self.trainable_variables]

        def of_client(client):
            weights, losses = start, []
            for _ in range(2):
                with tf.GradientTape() as tape:
                    tape.watch(weights)
                    losses.append(squared(self.model, weights, *client))
                slopes = tape.gradient(losses[-1], weights)
                weights = [w - RATE * g for w, g in zip(weights, slopes, strict=True)]
            return losses[0], [s - w for s, w in zip(start, weights, strict=True)]

        signature = tf.float32, [tf.float32] * len(start)
        losses, gone = tf.map_fn(of_client, batch, fn_output_signature=signature)
        divisor = tf.cast(divisor, tf.float32)
        return tf.reduce_sum(losses) / divisor, [tf.reduce_sum(g, 0) / divisor for g in gone], None


TASKS = numbers(COUNT, 4, FEATURES), numbers(COUNT, 4, seed=8)


class HardExamples(TrainStep):
    """Examples whose loss was above the mean when they were last seen count twice, as in online
    hard example mining (Shrivastava et al. 2016, arXiv:1604.03540), by ``(x, y, index)``."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = self.variable("seen", [COUNT])

    def count(self, batch):
        return super().count(batch[:2])

    def loss(self, batch):
        features, labels, index = batch
        outputs = self.model(features, training=True)
        losses = self.loss_fn(labels, outputs)
        hard = tf.gather(self.seen, index) > tf.reduce_mean(self.seen)
        where, new = all_gather(index), all_gather(tf.stop_gradient(losses))
        self.seen.assign(tf.tensor_scatter_nd_update(self.seen, where[:, tf.newaxis], new))
        return tf.where(hard, 2.0, 1.0) * losses, outputs

    def update_metrics(self, batch, outputs):
        super().update_metrics(batch[:2], outputs)


class PINN(TrainStep):
    """Raissi et al. 2019: u'' = -sin(x) inside, and given values at the edge: two sources."""

    def loss(self, batch):
        (inside, edge), values = batch
        with tf.GradientTape() as outer:
            outer.watch(inside)
            with tf.GradientTape() as inner:
                inner.watch(inside)
                u = self.model(inside, training=True)
            slope = inner.gradient(u, inside)
        residual = outer.gradient(slope, inside) + tf.sin(inside)
        at_edge = self.model(edge, training=True) - values
        return tf.reduce_sum(residual**2 + at_edge**2, axis=-1)


# State of each example ----------------------------------------------------------------------------


def walk(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An environment in NumPy: position and speed on a line, pushed to the left or to the right."""
    position, speed = state.T
    speed = 0.9 * speed + 0.1 * (2.0 * action - 1.0)
    position = np.where(np.abs(position + speed) > 1.0, 0.0, position + speed)
    state = np.stack([position, speed], axis=-1)
    return state.astype(np.float32), (-np.abs(position - 0.5)).astype(np.float32)


class A2C(TrainStep):
    """Mnih et al. 2016, arXiv:1602.01783, synchronous. An example is an environment; the data have
    the random numbers that choose its actions, [n, steps]."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        rows = BATCH // tf.distribute.get_strategy().num_replicas_in_sync
        self.environments = self.variable("environments", [rows, 2], per_replica=True)

    def count(self, batch):
        return batch.shape[0]

    def loss(self, batch):
        state, steps = tf.identity(self.environments), []
        for chance in tf.unstack(batch, axis=1):
            logits, value = tf.split(self.model(state, training=True), [2, 1], axis=-1)
            action = tf.cast(chance > tf.nn.softmax(logits)[:, 0], tf.int64)
            steps.append((tf.nn.log_softmax(logits), value[:, 0], action))
            state, reward = tf.numpy_function(walk, [state, action], (tf.float32, tf.float32))
            state, reward = tf.ensure_shape(state, [None, 2]), tf.ensure_shape(reward, [None])
            steps[-1] += (reward,)
        self.environments.assign(state)
        returns, losses = tf.stop_gradient(self.model(state, training=True)[:, 2]), 0.0
        for log_policy, value, action, reward in reversed(steps):
            returns = reward + 0.9 * returns
            advantage = returns - value
            chosen = tf.gather(log_policy, action, axis=1, batch_dims=1)
            entropy = -tf.reduce_sum(tf.exp(log_policy) * log_policy, axis=-1)
            losses += -chosen * tf.stop_gradient(advantage) + 0.5 * advantage**2 - 0.01 * entropy
        return losses


class TruncatedBPTT(TrainStep):
    """Williams and Peng 1990: the state of a recurrent layer goes from one batch to the next, its
    gradient does not. Row i of a batch goes on in row i of the next."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        rows = BATCH // tf.distribute.get_strategy().num_replicas_in_sync
        self.carried = self.variable("carried", [rows, WIDTH], per_replica=True)

    def loss(self, batch):
        features, targets = batch
        recurrent, last = self.model.layers
        outputs, state = recurrent(features, initial_state=self.carried.read_value(), training=True)
        self.carried.assign(state)
        return tf.reduce_mean((last(outputs)[..., 0] - targets) ** 2, axis=-1)


def recurrent(kind=layers.GRU) -> keras.Model:
    steps = keras.Input([3, WIDTH])
    cell = kind(WIDTH, return_sequences=True, return_state=True)
    last = layers.Dense(1)
    net = keras.Sequential([cell, last])
    last(cell(steps)[0])
    net.built = True
    return net


def stream() -> tf.data.Dataset:
    features, targets = numbers(4, BATCH, 3, WIDTH), numbers(4, BATCH, 3, seed=8)
    rows = [array.reshape(-1, *array.shape[2:]) for array in (features, targets)]
    return tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(BATCH, drop_remainder=True)


class ScheduledSampling(TrainStep):
    """Bengio et al. 2015, arXiv:1506.03099: the decoder sees its own last word, or the right one,
    by a coin for each position, whose chance falls with the steps."""

    def loss(self, batch):
        source, target = batch
        embed, encoder, cell, last = self.model.layers
        state = tf.zeros([tf.shape(source)[0], WIDTH])
        for word in tf.unstack(source, axis=1):
            _, (state,) = encoder(embed(word), [state], training=True)
        right = tf.exp(-0.1 * tf.cast(self.global_step, tf.float32))
        coins = tf.random.stateless_uniform([target.shape[1]], self.seed("coin", per_replica=False))
        word, losses = tf.zeros_like(target[:, 0]), 0.0
        for position in range(target.shape[1]):
            output, (state,) = cell(embed(word), [state], training=True)
            logits = last(output)
            losses += cross_entropy(target[:, position], logits)
            guess = tf.argmax(logits, axis=-1)
            word = tf.where(coins[position] < right, target[:, position], guess)
        return losses


def sequence_to_sequence() -> keras.Model:
    cells = layers.GRUCell(WIDTH), layers.GRUCell(WIDTH)
    parts = layers.Embedding(8, WIDTH), *cells, layers.Dense(8)
    word = parts[0](keras.Input([], dtype="int64"))
    state = [keras.Input([WIDTH])]
    for cell in cells:
        parts[-1](cell(word, state)[0])
    net = keras.Sequential(parts)
    net.built = True
    return net


WORDS = tuple(np.random.default_rng(seed).integers(0, 8, [COUNT, 2]) for seed in (7, 8))

RIGHT = {
    "a2c": Method(A2C, chances(2), {"network": functools.partial(model, features=2, outputs=3)}),
    "byol": Method(BYOL, VIEWS, {"network": of_two}),
    "fedavg": Method(
        FedAvg,
        TASKS,
        {
            "network": functools.partial(model, outputs=1),
            "optimizer": lambda net: keras.optimizers.SGD(1.0),
        },
    ),
    "hard examples": Method(
        HardExamples, (*examples(COUNT), np.arange(COUNT)), {"metrics": [accuracy]}
    ),
    "lookahead": Method(Lookahead),
    "maml": Method(MAML, TASKS, {"network": functools.partial(model, outputs=1)}),
    "moco": Method(MoCo, VIEWS),
    "muon": Method(TrainStep, None, {"optimizer": muon_and_adamw}),
    "pcgrad": Method(PCGrad, None, {"network": functools.partial(model, outputs=CLASSES + 2)}),
    "pinn": Method(
        PINN,
        ((numbers(COUNT, 1), numbers(COUNT, 1, seed=8)), numbers(COUNT, 1, seed=9)),
        {"network": functools.partial(model, features=1, outputs=1)},
    ),
    "r-drop": Method(RDrop, None, {"network": lambda: model(layers.Dropout(0.3))}),
    "scheduled sampling": Method(ScheduledSampling, WORDS, {"network": sequence_to_sequence}),
    # With a loss scale beside a variable of each replica.
    "truncated bptt": Method(TruncatedBPTT, stream, {"network": recurrent, "loss_scale": True}),
    "wgan-gp": Method(
        WGANGP,
        (numbers(COUNT, FEATURES), (numbers(COUNT, WIDTH, seed=8), chances(1))),
        {"network": generator_and_critic, "optimizer": one_for_each},
    ),
}
# These draw other numbers on each replica, so N replicas do not equal one.
DRAWING = {"r-drop"}
# Those without a `loss` for mistakes in it, and those that need two traces, or no equal replicas.
NOT_COMPOSED = {"fedavg", "pcgrad", "wgan-gp", *DRAWING}


def check_right(make, name: str, replicas: int = 2, steps: int = 3) -> None:
    """Makes all checks that ``make``, of the method ``name``, must pass."""
    equal = () if name in DRAWING else (replicas,)
    testing.check_step(make, replicas=equal, steps=steps)
    if not equal:
        testing.check_noise(make, replicas)
        testing.check_resumed(make, replicas, steps=steps)
