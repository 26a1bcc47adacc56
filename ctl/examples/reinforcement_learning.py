"""Reinforcement learning: each batch is played by the policy as it is now. A pole is balanced.

    python -m ctl.examples.reinforcement_learning

REINFORCE with a baseline (Williams 1992): the loss of a move is its cross entropy, times how much
longer than the others the pole stands after it. After 60 steps, it stands for all 4 s of a game.
"""

import itertools

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import ctl

POLES, LIMIT, STEPS = 16, 200, 60


def push(states: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The carts and their poles, [n, 4], 0.02 s later (Barto, Sutton and Anderson 1983)."""
    _, speed, angle, spin = states.T
    sine, cosine = np.sin(angle), np.cos(angle)
    thrust = (np.where(right, 10.0, -10.0) + 0.05 * spin**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * thrust) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    changes = np.stack([speed, thrust - 0.05 * turn * cosine / 1.1, spin, turn], axis=1)
    return (states + 0.02 * changes).astype("float32")


def play(policy: keras.Model, number: int) -> dict[str, np.ndarray]:
    """Game ``number``: all that the policy sees and does until each pole has fallen."""
    random = np.random.default_rng(number)
    steps: list = []
    states = random.uniform(-0.05, 0.05, [POLES, 4]).astype("float32")
    stands = np.full(POLES, True)
    while stands.any() and len(steps) < LIMIT:
        odds = tf.sigmoid(policy(states)[:, 0]).numpy()
        right = (random.uniform(size=POLES) < odds).astype("float32")
        steps.append((states, right, stands))
        states = push(states, right)
        stands = stands & (np.abs(states[:, 0]) < 2.4) & (np.abs(states[:, 2]) < 0.21)
    seen, actions, stood = map(np.array, zip(*steps, strict=True))  # [time, poles, ...]
    left = np.cumsum(stood[::-1], axis=0)[::-1].astype("float32")  # how long each will stand
    better = left - left.mean(axis=1, where=stood, keepdims=True)
    better /= better[stood].std() + 1e-6
    return {"state": seen[stood], "right": actions[stood], "advantage": better[stood]}


class Reinforce(ctl.TrainStep):
    """Trains on games: a batch has as many rows as there were moves."""

    def loss(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        logits = self.model(batch["state"], training=True)[:, 0]
        return batch["advantage"] * tf.nn.sigmoid_cross_entropy_with_logits(batch["right"], logits)


def make_loop() -> ctl.Loop:
    """With one step per call, a game begins when the step before it has ended."""
    model = keras.Sequential([keras.Input([4]), layers.Dense(32, "tanh"), layers.Dense(1)])
    policy = tf.function(model)
    rows = tf.TensorSpec([None])
    games = tf.data.Dataset.from_generator(
        lambda: (play(policy, number) for number in itertools.count()),
        output_signature={"state": tf.TensorSpec([None, 4]), "right": rows, "advantage": rows},
    )
    return ctl.Loop(Reinforce(model, keras.optimizers.Adam(0.01)), games, steps_per_loop=1)


def main() -> None:
    keras.utils.set_random_seed(1)
    loop = make_loop()
    for until in range(10, STEPS + 1, 10):
        loop.train(until)
        states = play(loop.step.model, until)["state"]
        print(f"step {until}: a pole stands for {0.02 * len(states) / POLES:.1f} s")


if __name__ == "__main__":
    main()
