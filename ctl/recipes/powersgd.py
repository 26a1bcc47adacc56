"""Sums gradients as products of two thin matrices, found by one step of a power iteration. What the
product leaves out of a replica's gradient is added to its next one.

Vogels et al. 2019 (arXiv:1905.13727), algorithms 1 and 2; the optimizer takes the place of the
momentum of algorithm 2. Both products are linear in the gradients, so N replicas equal one::

    python -m ctl.train --model_dir=/tmp/powersgd --step=ctl.recipes.powersgd:PowerSGD \\
        --powersgd_rank=2 --replicas=2

Of a kernel [..., m] with n * m numbers, one all-reduce moves n * rank, and a second one m * rank.
Where that is not less, as for biases, the gradient itself is summed.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

import ctl
from ctl import UsageError


class PowerSGD(ctl.TrainStep):
    """Sums gradients of low rank, with error feedback and a warm start.

    Attributes:
        thin: index of a kernel -> float32 [m, rank], the right matrix of the last step.
        left: index of a kernel -> float32 [n, m], what this replica has not sent yet.
    """

    powersgd_rank: int = ctl.option(2, "Columns of the thin matrices.", lower_bound=1, fixed=True)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        r = self.powersgd_rank
        self.shapes = [v.shape for v in self.model.trainable_variables]
        self.thin: dict[int, tf.Variable] = {}
        self.left: dict[int, tf.Variable] = {}
        for i, shape in enumerate(self.shapes):
            n, m = math.prod(shape[:-1]), shape[-1] if shape else 1
            if (n + m) * r < n * m:
                self.thin[i] = self.variable(f"thin{i}", [m, r])
                self.thin[i].assign(tf.random.stateless_normal([m, r], [self.seeds.run, i]))
                self.left[i] = self.variable(f"left{i}", [n, m], per_replica=True, on_resize="sum")

    @tf.autograph.experimental.do_not_convert
    def sum_gradients(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        if [tuple(g.shape) for g in gradients] != self.shapes:
            raise UsageError("PowerSGD needs gradients of exactly the variables of the model")
        whole, sums = {}, list(gradients)
        for i, left in self.left.items():
            whole[i] = tf.reshape(tf.cast(gradients[i], tf.float32), left.shape) + left.read_value()
            sums[i] = whole[i] @ self.thin[i].read_value()
        sums = super().sum_gradients(sums)
        bases = {i: tf.linalg.qr(sums[i]).q for i in whole}
        mine = {i: tf.transpose(whole[i]) @ basis for i, basis in bases.items()}
        for i, thin in zip(whole, super().sum_gradients([*mine.values()]), strict=True):
            self.left[i].assign(whole[i] - bases[i] @ tf.transpose(mine[i]))
            self.thin[i].assign(thin)
            product = bases[i] @ tf.transpose(thin)
            sums[i] = tf.cast(tf.reshape(product, gradients[i].shape), gradients[i].dtype)
        return sums
