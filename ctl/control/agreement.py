"""Checks that all workers run the same step, and that all replicas hold the same state.

Otherwise, TensorFlow would silently sum unrelated tensors, and a checkpoint, which holds one
replica's state, would be wrong for the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ctl.checkpoint import manifest
from ctl.control import source_hash
from ctl.control.model_config import global_settings, model_config, settings_of
from ctl.data.dataset import Dataset
from ctl.distributed import replicas, workers
from ctl.distributed.watch import watchdog
from ctl.errors import UsageError
from ctl.phases import options
from ctl.phases.plan.plan import Plan
from ctl.step import TrainStep

# Arguments of a step on which its result depends.
_SETTINGS = (
    *("clip_norm", "accumulate_steps", "ema_decay", "loss_scale", "on_nan"),
    *("bytes_per_pack", "jit_compile", "jit_update"),
)


def agree(
    step: TrainStep, dataset: Dataset, trace: Callable[[], Any], plan: Callable[[], Plan]
) -> None:
    """Compares code, model, optimizer, data and all-reduces over all workers.

    Args:
        step: a built step.
        dataset: the dataset of the loop.
        trace: traces the step. All workers wait until each has traced it.
        plan: returns the plan of the trace.

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


def check_state(step: TrainStep, *, this_worker: bool = False) -> None:
    """Refuses state of a user's layers and step that differs between replicas.

    Args:
        step: a built step, after at least one call.
        this_worker: compares the replicas of this worker only. Otherwise all workers must call it.

    Raises:
        UsageError: the forward pass has given a variable different values on the replicas.
    """
    strategy = step.strategy
    combined = {id(v) for v in (*step.statistics.combined, *step.unsynchronized_variables())}
    named = [(v.path, v.value) for v in replicas.other_state(step.tracked.layer)]
    named += [(v.name, v) for v in step.tracked.raw_variables]
    state = [(name, v) for name, v in named if id(v) not in combined]
    if not state or strategy.num_replicas_in_sync == 1:
        return
    values = [
        {
            source_hash.hash_of([one.numpy().tobytes()])
            for one in strategy.experimental_local_results(v)
        }
        for _, v in state
    ]
    if not this_worker:
        local_hashes = json.dumps([sorted(hashes) for hashes in values]).encode()
        for text in workers.all_gather(strategy, local_hashes, "comparing the state"):
            for hashes, theirs in zip(values, json.loads(text), strict=True):
                hashes.update(theirs)
    different = [name for (name, _), hashes in zip(state, values, strict=True) if len(hashes) > 1]
    if different:
        raise UsageError(
            f"variable {', '.join(different)} differs between replicas: the forward pass updates "
            "it with the replica's part of the batch, and a checkpoint holds one value. For the "
            "mean over replicas, return it (of a Keras variable, its .value) from "
            "TrainStep.replica_statistics(); for the value of replica 0, make it with "
            "aggregation='only_first_replica'"
        )


def plan_facts(plan: Callable[[], Plan]) -> dict[str, str]:
    """The all-reduces in the graph of the step; empty if the graph cannot be read."""
    try:
        return plan().facts()
    except Exception as error:  # training works without the plan
        logging.warning("the plan of the all-reduces is not compared: %r", error)
        return {}
