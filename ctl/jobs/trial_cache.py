"""The choices of earlier trials (`ctl.jobs.trials`), by what was tried and where."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from ctl.base import durable
from ctl.base.cache import processor
from ctl.checkpoint.manifest import unnumbered
from ctl.control import source_hash
from ctl.distributed import replicas, workers

if TYPE_CHECKING:
    from ctl.loop import Loop
    from ctl.step import TrainStep

_MOST = 256  # choices in a file; the oldest go first


class Known:
    """The choice of an earlier trial of the same step, batch, devices and versions.

    Workers use it where all of them know the same one. A file that cannot be read or written only
    costs a trial.

    Args:
        path: of the file, see `ctl.base.cache`.
        loop: of the trial.
        name: of the setting.
        values: to choose from.
    """

    def __init__(self, path: Path, loop: Loop, name: str, values: Sequence[Any]):
        self._path, self._strategy, self._values = path, loop.strategy, values
        self._key = source_hash.hash_of([json.dumps(_facts(loop, name, values)).encode()])

    def value(self) -> Any:
        """The choice; None if there is none."""
        mine = self._read().get(self._key)
        if workers.is_multi_worker(self._strategy):
            texts = workers.all_gather(self._strategy, json.dumps(mine).encode(), "a gather")
            mine = mine if len(set(texts)) == 1 else None
        known = [value for value in self._values if value == mine and type(value) is type(mine)]
        return known[0] if known else None

    def note(self, value: Any) -> None:
        """Writes a choice, beside those that other processes may have written meanwhile."""
        choices = {**self._read(), self._key: value}
        kept = dict(list(choices.items())[-_MOST:])
        try:
            durable.write_json(self._path, kept, via=self._path.parent)
        except OSError as error:
            logging.warning("the choice is not kept for other runs: %s", error)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, durable.Damaged):
            content = durable.read_json(self._path)
            if isinstance(content, dict):
                return content
        return {}


def _facts(loop: Loop, name: str, values: Sequence[Any]) -> list[Any]:
    """All on which the time of a step depends."""
    step, data = loop.step, loop.dataset
    settings = ("clip_norm", "accumulate_steps", "ema_decay", "loss_scale", "on_nan", "jit_update")
    return [
        name,
        [*values],
        _network(step),
        [f"{v.dtype.name}{v.shape}" for v in step.trainable_variables],
        source_hash.class_name(step),
        source_hash.of_step(step),
        source_hash.of_ctl(),
        [str(getattr(step, setting)) for setting in settings],
        [type(optimizer).__name__ for optimizer in step.updater.optimizers().values()],
        [data.global_batch_size, type(data).__name__],
        [type(loop.strategy).__name__, loop.strategy.num_replicas_in_sync],
        _between(loop),
        sorted({v.device for v in step.trainable_variables}),
        [processor(), platform.machine()],
        [importlib.metadata.version(package) for package in ("tensorflow", "keras", "numpy")],
        [device.name for device in tf.config.list_physical_devices()],
    ]


def _between(loop: Loop) -> list[str]:
    """How replicas communicate, and on how many hosts."""
    options = loop.step.options
    several = workers.is_multi_worker(loop.strategy)
    addresses = workers.cluster_of(loop.strategy).workers if several else ()
    hosts = {address.rpartition(":")[0] for address in addresses}
    return [str(options and options.implementation), str(len(hosts))]


def _network(step: TrainStep) -> str:
    layers = [type(layer).__name__ for layer in replicas.layers_of(step.tracked.layer)]
    with contextlib.suppress(Exception):  # a model of the user's may have no configuration
        return unnumbered(f"{layers} {step.model.get_config()}")
    return str(layers)
