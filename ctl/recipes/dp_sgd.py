"""Training with differential privacy: the weights tell little about any single example.

Abadi et al. 2016 (arXiv:1607.00133), algorithm 1: the gradient of each example is scaled down to a
norm of at most C, and Gaussian noise of standard deviation ``noise * C`` is added to their sum. It
is added once, after the sum over replicas, so N replicas equal one. The defaults are those of
section 5.2, and the accountant is Google's: ``pip install 'ctl[privacy]'``::

    python -m ctl.train --model_dir=/tmp/private --step=ctl.recipes.dp_sgd:DPSGD --model=dense \\
        --global_batch_size=500 --optimizer=momentum --learning_rate=0.05 --log_every=20

Log records have two numbers for ``dp_delta``, of all steps so far. Both compare with a training to
which one of the examples adds nothing:

- ``epsilon`` holds for the batches of ctl. An example is in one batch of an epoch, so an epoch
  counts as one sum with noise.
- ``epsilon_poisson`` is the number that papers report. It would hold if each step drew each example
  independently, with one probability (Poisson sampling). A shuffled epoch does not draw so,
  and the difference can be large (Chua et al. 2024, arXiv:2403.17673).

They hold for the weights and their averages. The loss and the metrics of the training, in the same
log, have no noise. Whoever knows ``--seed`` can subtract the noise: give a secret one, and keep
``config.json``, which has it, to yourself. A seed of 32 bits can be found by trying all, and the
noise is float32 from Philox, which is not made for cryptography: this is for research, not for
weights that you publish. All steps are taken to have had the same ``dp_noise``. Settings that were
chosen with the data are not accounted for.

The examples of a replica go through the model one by one, as micro-batches, so that no layer can
mix them. It takes the time of as many small steps. ``--accumulate_steps`` is refused.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import tensorflow as tf

import ctl
from ctl import UsageError, global_norm, replicas

_MOST = 10**6  # more micro-batches than a replica has examples, so each has one
_ORDERS = [*range(2, 65), 128, 256, 512]  # of the accountant, which is slow for fractions


class DPSGD(ctl.TrainStep):
    """Clips the gradient of each example, adds noise, and logs ``epsilon`` and ``epsilon_poisson``.

    What is clipped is the gradient of the loss of an example and of the regularization. If examples
    have weights, these must not be private.

    Raises:
        UsageError: dp-accounting is missing, a BatchNormalization trains, updates may be skipped,
            or an epoch is not a whole number of global batches.
    """

    dp_clip: float = ctl.option(4.0, "Maximum norm of an example's gradient.", lower_bound=1e-6)
    dp_noise: float = ctl.option(4.0, "Noise deviation / dp_clip.", lower_bound=0.0, fixed=True)
    dp_delta: float = ctl.option(1e-5, "Delta of the logged epsilon.", lower_bound=0.0)

    def build(self, strategy: tf.distribute.Strategy, schedule: Any = None) -> None:
        """See `ctl.TrainStep.build`."""
        if importlib.util.find_spec("dp_accounting") is None:
            raise UsageError("DPSGD needs dp-accounting: pip install 'ctl[privacy]'")
        # They mix examples; a skipped update tells of one; workers would share the noise of a step.
        mixes = replicas.training_norms(self.tracked.layer) or replicas.has_one_copy(strategy)
        if mixes or self.on_nan == "skip" or self.loss_scale:
            raise UsageError(
                "DPSGD supports no BatchNormalization, float16, on_nan=skip or parameter servers"
            )
        if self.accumulate_steps > 1:
            raise UsageError("DPSGD takes examples one by one: leave out accumulate_steps")
        self.accumulate_steps = _MOST
        super().build(strategy, schedule)

    def attach(self, loop: ctl.Loop) -> None:
        """See `ctl.TrainStep.attach`."""
        super().attach(loop)
        data = loop.dataset
        self.size, self.examples = data.global_batch_size or 0, data.num_examples or 0
        if isinstance(getattr(data, "dataset", data), ctl.data.Mixture | ctl.data.StreamedMixture):
            raise UsageError("DPSGD needs each example once per epoch, but a mixture repeats some")
        if not self.size or not self.examples or self.examples % self.size:
            given = f"--global_batch_size={self.size} does not divide {self.examples} examples"
            raise UsageError(f"DPSGD needs batches of one size: {given}")

    def loss_and_gradients(
        self, batch: Any, divisor: Any
    ) -> tuple[tf.Tensor, list[tf.Tensor | None], Any]:
        """See `ctl.TrainStep.loss_and_gradients`; of one example, whose gradient is clipped."""
        loss, gradients, outputs = super().loss_and_gradients(batch, divisor)
        bound = self.dp_clip / tf.cast(divisor, tf.float32)
        return loss, tf.clip_by_global_norm(gradients, bound, global_norm(gradients))[0], outputs

    def reduce(self, loss: tf.Tensor, count: Any, gradients: list, snapshot: Any) -> tuple:
        """See `ctl.TrainStep.reduce`; adds the noise, the same on all replicas."""
        loss, total, gradients = super().reduce(loss, count, gradients, snapshot)
        deviation = self.dp_noise * self.dp_clip / tf.cast(total, tf.float32)

        def noisy(number: int, gradient: tf.Tensor) -> tf.Tensor:
            seed = self.seed(f"noise {number}", per_replica=False)
            noise = tf.random.stateless_normal(gradient.shape, seed)
            return gradient + tf.cast(deviation * noise, gradient.dtype)

        return loss, total, [g if g is None else noisy(n, g) for n, g in enumerate(gradients)]

    def results(self) -> dict[str, float]:
        """See `ctl.TrainStep.results`; adds the privacy of all steps so far."""
        return super().results() | self.privacy(int(self.global_step.numpy()))

    def privacy(self, steps: int) -> dict[str, float]:
        """``epsilon`` and ``epsilon_poisson`` of so many steps."""
        import dp_accounting

        size, examples = self.size, self.examples
        noise = dp_accounting.GaussianDpEvent(self.dp_noise)
        events = {
            "epsilon": (noise, math.ceil(steps / (examples // size))),
            "epsilon_poisson": (dp_accounting.PoissonSampledDpEvent(size / examples, noise), steps),
        }
        account = dp_accounting.rdp.RdpAccountant
        return {
            name: account(_ORDERS).compose(*event).get_epsilon(self.dp_delta)
            for name, event in events.items()
        }
