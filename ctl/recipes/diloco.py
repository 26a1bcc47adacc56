"""Each replica trains its own weights for a round of many steps. Then an outer optimizer takes one
step along the mean of how far they went.

Douillard et al. 2023 (arXiv:2311.08105), algorithm 1: AdamW within rounds, with slots of each
replica that rounds do not reset, and SGD with Nesterov's momentum between them. The defaults are
those of the paper::

    python -m ctl.train --model_dir=/tmp/diloco --step=ctl.recipes.diloco:DiLoCo \\
        --optimizer=adamw --local_steps=500 --replicas=2

See `ctl.recipes.local_sgd` for what crosses replicas within a round, and what is evaluated.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import ctl
from ctl import replicas
from ctl.recipes.local_sgd import LocalSGD


class DiLoCo(LocalSGD):
    """Trains weights of each replica, and takes an outer step every ``local_steps`` steps."""

    outer_rate: float = ctl.option(0.7, "Learning rate of outer steps.", lower_bound=0.0)
    outer_momentum: float = ctl.option(0.9, "Momentum of the outer steps.", lower_bound=0.0)
    default_steps = 500

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        weights = [v.value for v in self.model.trainable_variables]
        self.starts = [tf.Variable(v, trainable=False) for v in weights]  # of this round
        velocities = [tf.Variable(tf.zeros_like(v), trainable=False) for v in weights]
        self.outer = [self.starts, velocities]

    def __call__(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        begins = tf.equal(self.global_step, 0)
        for variable, start in zip(self.trainable_variables, self.starts, strict=True):
            now, mine = replicas.own_copy(variable), replicas.own_copy(start)
            mine.assign(tf.where(begins, now.read_value(), mine.read_value()))
        return super().__call__(batch)

    def join(self, variable: tf.Variable, mean: tf.Tensor, *outer: tf.Variable) -> None:
        """Takes an outer step of one weight from where the round began."""
        start, velocity = outer
        gone = start - mean
        velocity.assign(self.outer_momentum * velocity + gone)
        start.assign_sub(self.outer_rate * (gone + self.outer_momentum * velocity))
        variable.assign(start)
