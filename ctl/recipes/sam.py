"""Sharpness-aware minimization: the gradient is taken where the loss is highest nearby.

Each step moves the weights by ``rho`` along the gradient of the global batch, computes the gradient
there, and applies it to the weights where they were. The logged loss and metrics are those of the
moved weights. A step costs two forward and backward passes and two all-reduces.

Foret, Kleiner, Mobahi and Neyshabur 2021, arXiv:2010.01412, algorithm 1 and equation 2. The default
of ``rho`` is that of section 3.1::

    python -m ctl.train --model_dir=/tmp/sam --step=ctl.recipes.sam:SAM --rho=0.05
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import ctl
from ctl import global_norm, passes


class SAM(ctl.TrainStep):
    """Trains with sharpness-aware minimization."""

    rho: float = ctl.option(0.05, "Norm of the perturbation of the weights.", lower_bound=0.0)

    def direction(
        self, gradients: list[tf.Tensor | None], count: int | tf.Tensor
    ) -> list[tf.Tensor | None]:
        """Returns the gradient of the global batch, equal on all replicas. An override that returns
        ``gradients`` moves the weights of each replica along its own (m-sharpness, section 4.1)."""
        return passes.reduced(self, gradients, count)

    def forward_backward(
        self, batch: Any, count: int | tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        """See `ctl.TrainStep.forward_backward`; at the moved weights."""
        with passes.state_kept(self):
            _, gradients = super().forward_backward(batch, count)
        gradients = self.direction(gradients, count)
        scale = self.rho / (global_norm(gradients) + 1e-12)
        moves = [None if g is None else scale * tf.cast(g, scale.dtype) for g in gradients]
        with passes.perturbed(self, moves):
            return super().forward_backward(batch, count)
