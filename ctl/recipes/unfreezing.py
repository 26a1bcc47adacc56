"""Gradual unfreezing: the last layer trains first, and one more joins every so many steps.

Howard and Ruder 2018, arXiv:1801.06146, section 3.3, where a layer joins after each epoch: a
pretrained model that trains all layers at once forgets what it has learned. A function that loads
that model is ``--model=package.module:function``. Layers that do not train yet keep their weights
and slots, but a BatchNorm still moves its statistics::

    python -m ctl.train --model_dir=/tmp/unfreezing --unfreeze_steps=100 \\
        --step=ctl.recipes.unfreezing:GradualUnfreezing
"""

from __future__ import annotations

import keras

import ctl


class GradualUnfreezing(ctl.TrainStep):
    """Trains the last 1 + s // ``unfreeze_steps`` layers at step s, those with weights to train.

    A checkpoint says what trains, so a resume continues where it was.
    """

    unfreeze_steps: int = ctl.option(500, "Steps between added layers.", lower_bound=1)

    def layers(self) -> list[keras.Layer]:
        """The layers in the order in which they are in the model, which is that of features to
        outputs. A model within the model stands for its layers. Override for groups of layers."""
        return [layer for layer in _flat(self.model) if layer.trainable_variables]

    def attach(self, loop: ctl.Loop) -> None:
        """See `ctl.TrainStep.attach`."""
        super().attach(loop)
        layers = self.layers()

        def unfreeze(step: int) -> None:
            count = 1 + step // self.unfreeze_steps
            loop.train_only(layers[-count:] if count < len(layers) else None)  # in the end, all

        unfreeze(0)
        # Before actions that save, so that a checkpoint says what trains next.
        every = ctl.Every(lambda status: unfreeze(status.step), steps=self.unfreeze_steps)
        loop.actions.insert(0, every)


def _flat(model: keras.Model) -> list[keras.Layer]:
    parts = [_flat(part) if isinstance(part, keras.Model) else [part] for part in model.layers]
    return [layer for part in parts for layer in part]
