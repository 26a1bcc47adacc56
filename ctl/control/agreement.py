"""Checks that all workers run the same step. Otherwise, TensorFlow would silently sum unrelated
tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ctl.checkpoint import manifest
from ctl.control import source_hash
from ctl.control.model_config import global_settings, model_config, settings_of
from ctl.data.dataset import Dataset
from ctl.distributed import workers
from ctl.distributed.watch import watchdog
from ctl.phases import options
from ctl.phases.plan.plan import Plan
from ctl.step import TrainStep

# Arguments of a step on which its result depends.
_SETTINGS = (
    *("clip_norm", "accumulate_steps", "ema_decay", "loss_scale", "on_nan"),
    *("bytes_per_pack", "jit_compile", "jit_update", "sparse_rows", "embedding_plan"),
)


def agree(
    step: TrainStep, dataset: Dataset, trace: Callable[[], Any], plan: Callable[[], Plan]
) -> None:
    """Compares code, model, optimizer, data and all-reduces over all workers. ``trace`` traces the
    built ``step``, and all workers wait until each has; ``plan`` returns the plan of the trace.

    Raises:
        UsageError: the workers differ.
        PeerError: a worker is missing.
    """
    strategy = step.strategy
    workers.check_agreement(
        strategy,
        {
            "the step": int(step.global_step.numpy()),
            "the version of TensorFlow": tf.__version__,
            "the version of Keras": keras.__version__,
            "the code of ctl": source_hash.of_ctl(),
            "the class of the step": source_hash.class_name(step),
            "the code of the step": source_hash.of_step(step),
            **{name: getattr(step, name) for name in _SETTINGS},
            **{f"the option {name}": getattr(step, name) for name in options.options(type(step))},
            "random_seed": step.seeds.run,
            "what trains": step.trainable_mask,
            **{
                f"the {what}": settings_of(optimizer)
                for what, optimizer in step.updater.optimizers().items()
            },
            **{f"data: {key}": value for key, value in dataset.fingerprint().items()},
            **{
                f"variable {number}": f"{manifest.unnumbered(v.path)} {v.dtype} {list(v.shape)}"
                for number, v in enumerate(step.tracked.layer.trainable_variables)
            },
            **model_config(step),
            **global_settings(),
        },
        {
            f"the source of the module {name}": text
            for name, text in source_hash.of_modules().items()
        },
    )
    trace()
    workers.barrier(strategy, watchdog.FIRST_CALL_SECONDS)
    workers.check_agreement(strategy, plan_facts(plan))


def plan_facts(plan: Callable[[], Plan]) -> dict[str, str]:
    """The all-reduces in the graph of the step; empty if the graph cannot be read."""
    try:
        return plan().facts()
    except Exception as error:  # training works without the plan
        logging.warning("the plan of the all-reduces is not compared: %r", error)
        return {}
