"""Fine-tuning with low-rank updates: the weights of a trained model are frozen, and each
kernel W of a dense layer becomes W + (alpha / rank) A B, of which only A and B train.

Hu et al. 2021, arXiv:2106.09685, section 4.1. B begins at zero, so the model begins as the trained
one. `keras.layers.Dense.enable_lora` adds A and B; this recipe freezes all others. The export has
the sums in its kernels::

    python -m ctl.train --model_dir=/tmp/base
    python -m ctl.train --model_dir=/tmp/lora --model=ctl.recipes.lora:make_model \\
        --lora_base=/tmp/base/export/model.keras --lora_rank=4 --learning_rate=1e-2
"""

from __future__ import annotations

from typing import Any

import keras
from absl import flags

import ctl
from ctl import UsageError, replicas

flags.DEFINE_string(
    "lora_base", None, "Trained model to which low-rank updates are added, a .keras file."
)
flags.DEFINE_integer("lora_rank", 4, "Rank of the updates.", lower_bound=1)
flags.DEFINE_float("lora_alpha", None, "Scale of the updates (default: --lora_rank).")


def make_model() -> keras.Model:
    """The model of ``--lora_base``, with low-rank updates.

    Raises:
        UsageError: ``--lora_base`` is missing, is not a model, or has no dense layers.
    """
    values: Any = flags.FLAGS
    base, rank, alpha = (values[f"lora_{name}"].value for name in ("base", "rank", "alpha"))
    return low_rank(ctl.checkpoint.load_model(base, "lora_base"), rank, alpha)


def low_rank(model: keras.Model, rank: int, alpha: float | None = None) -> keras.Model:
    """Adds low-rank updates to ``model`` and freezes all else. Call it in ``strategy.scope()``.

    Args:
        model: a trained model. It is changed and returned.
        rank: columns of A and rows of B.
        alpha: scales A B, by alpha / rank; ``rank`` by default.

    Raises:
        UsageError: ``model`` has no layer `keras.layers.Dense` or `keras.layers.EinsumDense`, or it
            has such updates already.
    """
    kinds = keras.layers.Dense, keras.layers.EinsumDense
    dense: list[Any] = [layer for layer in replicas.layers_of(model) if isinstance(layer, kinds)]
    if not dense or any(layer.lora_enabled for layer in dense):
        which = "has low-rank updates already" if dense else "has no dense layer to update"
        raise UsageError(f"model {model.name} {which}: give another")
    for variable in model.trainable_variables:
        variable.trainable = False
    for layer in replicas.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False  # its moving statistics stay as they are, too
    for layer in dense:
        layer.enable_lora(rank, lora_alpha=alpha)
    return model
