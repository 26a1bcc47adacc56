"""Sends log records to MLflow and to Weights & Biases, from a thread: neither may stop a training.

A run keeps its id there in its directory, so that a resumed run goes on with it. One that begins
anew there calls `forget`.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from absl import logging

from ctl.base import durable
from ctl.base.actions import scalars_of
from ctl.errors import CheckpointError
from ctl.logs.hparams import Ending, ending

PATIENCE = 60.0  # seconds that the end of a run waits for what is not sent yet
_PARAMETERS = 100  # of one call of MLflow, at most
_LONGEST = 500  # characters of a parameter that every store of MLflow takes
_REFUSED = re.compile(r"[^\w/.\- :]")  # in names of metrics, by MLflow


class Service(Protocol):
    """What `Tracker` talks to; its methods may raise and may take long."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Sends a record, see `ctl.actions.Log`."""

    def close(self, how: Ending) -> None:
        """Says that the run has ended, and how."""


class Tracker:
    """A sink that sends records in a thread of its own.

    If the service fails, one warning says so, and no more is sent. A slow service costs no step.

    Args:
        name: of the service, for messages.
        connect: returns the service. Called in the thread, where its imports also happen.
        patience: seconds that `close` waits for what is not sent yet.
    """

    def __init__(self, name: str, connect: Callable[[], Service], patience: float = PATIENCE):
        self._name = name
        self._connect = connect
        self._patience = patience
        self._failed = False
        self._queue: queue.SimpleQueue[dict[str, Any] | Ending] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        if not self._failed:  # else the queue would grow
            self._queue.put(dict(record))

    def close(self) -> None:
        self._queue.put(ending())
        self._thread.join(self._patience)
        if self._thread.is_alive():
            logging.warning(
                "%s: not all was sent in the %g s after the end", self._name, self._patience
            )

    def _send(self) -> None:
        try:
            service = self._connect()
            while isinstance(record := self._queue.get(), dict):
                service.write(record)
            service.close(record)
        except Exception as error:
            self._failed = True
            said = " ".join(str(error).split())[:300]
            logging.warning(
                "%s: %s: %s; the training goes on without it",
                self._name,
                type(error).__name__,
                said,
            )


class MLflow:
    """A run of MLflow: flags are its parameters, scalars its metrics, such as ``eval/loss``.

    Its experiment is that of the environment variable ``MLFLOW_EXPERIMENT_NAME``, else ``ctl``.

    Args:
        uri: of the tracking server or the database, such as ``sqlite:////tmp/mlflow.db``.
        directory: of the run; keeps the id in ``mlflow.json``.
        flags: by name. MLflow keeps those of the beginning, also of a resumed run.
    """

    FILE = "mlflow.json"

    def __init__(self, uri: str, directory: Path, flags: Mapping[str, Any]):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._keys: dict[str, str] = {}  # of scalars by name
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = _kept_id(directory / self.FILE, uri)
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ctl")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(number, run_name=directory.name)
        self._run_id = run.info.run_id
        _keep_id(directory / self.FILE, uri, self._run_id)
        values = [Param(name, str(value)[:_LONGEST]) for name, value in flags.items()]
        for first in range(0, len(values), _PARAMETERS):
            self._client.log_batch(self._run_id, params=values[first : first + _PARAMETERS])

    def write(self, record: Mapping[str, Any]) -> None:
        at = int(1000 * record.get("time", time.time()))
        scalars = _named(record)
        add_keys(self._keys, scalars)
        metrics = [self._metric(self._keys[n], v, at, record["step"]) for n, v in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, how: Ending) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[how]
        self._client.set_terminated(self._run_id, status)


class WandB:
    """A run of Weights & Biases: flags are its config, scalars are drawn over ``step``.

    Its own environment variables apply, such as ``WANDB_MODE=offline`` and ``WANDB_API_KEY``.

    Args:
        project: its name.
        directory: of the run; keeps the id in ``wandb.json``, and the files of an offline run.
        flags: by name.
    """

    FILE = "wandb.json"

    def __init__(self, project: str, directory: Path, flags: Mapping[str, Any]):
        import wandb

        number = _kept_id(directory / self.FILE, project)
        self._run = wandb.init(
            project=project,
            name=directory.name,
            id=number,
            resume="allow" if number else None,
            dir=str(directory),
            config=dict(flags),
            allow_val_change=True,
            # It would wait for a key at the terminal, and for a network after the end.
            settings=wandb.Settings(
                console="off", silent=True, login_timeout=10, finish_timeout=PATIENCE
            ),
        )
        if not number:
            _keep_id(directory / self.FILE, project, self._run.id)
        # Its own count of steps must not fall, as the step of a resumed run may.
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **_named(record)})

    def close(self, how: Ending) -> None:
        if how == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if how == "finished" else 1)


def add_keys(keys: dict[str, str], names: Iterable[str]) -> None:
    """Adds to ``keys`` what MLflow calls each of ``names``: it refuses some characters. A name that
    would equal another gets a number."""
    for name in names:
        if name not in keys:
            allowed = key = _REFUSED.sub("_", name)
            number = 1
            while key in keys.values():
                number += 1
                key = f"{allowed}_{number}"
            keys[name] = key


def forget(directory: Path) -> None:
    """Lets the run in ``directory`` begin anew at all services: what it was there is of an attempt
    that was given up.

    Raises:
        CheckpointError: what it was cannot be deleted.
    """
    for service in (MLflow, WandB):
        path = directory / service.FILE
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot delete {path}: {error.strerror}; delete it, or choose another --model_dir"
            ) from error


def _named(record: Mapping[str, Any]) -> dict[str, float]:
    return {f"{record['phase']}/{name}": value for name, value in scalars_of(record).items()}


def _kept_id(path: Path, where: str) -> str | None:
    """The id in ``path`` of the run at ``where``; None if the run is new there."""
    try:
        kept = durable.read_json(path)
    except durable.Damaged:
        return None
    same = isinstance(kept, dict) and kept.get("where") == where
    return kept["id"] if same and isinstance(kept.get("id"), str) else None


def _keep_id(path: Path, where: str, number: str) -> None:
    durable.write_json(path, {"where": where, "id": number}, via=path.parent)
