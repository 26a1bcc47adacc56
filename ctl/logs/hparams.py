"""Writes the flags and the best results of a run for the HParams page of TensorBoard."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from ctl.base.actions import scalars_of
from ctl.errors import Preempted
from ctl.logs.runs import mode_of_result
from ctl.logs.sinks import EventFile, scalar_messages

Ending = Literal["finished", "stopped", "failed"]


class HParams:
    """A sink that writes the flags once, and the best results of evaluations so far to ``best/``.

    TensorBoard shows the runs of a directory side by side, with the last and the best results.

    Args:
        directory: of the run.
        flags: by name; values of other types than TensorBoard knows are left out.
        best: the best results of earlier evaluations, if the run is resumed.

    Raises:
        CheckpointError: the files cannot be written.
    """

    def __init__(
        self, directory: Path, flags: Mapping[str, Any], best: Mapping[str, float] | None = None
    ):
        self._flags = flags
        self._best = dict(best or {})
        self._session = EventFile(directory)
        self._results = EventFile(directory / "best")
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in flags.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            elif isinstance(value, str | list):
                start.hparams[name].string_value = str(value)
        self._write(session_start_info=start)

    def write(self, record: Mapping[str, Any]) -> None:
        if record["phase"] != "eval":
            return
        for name, value in scalars_of(record).items():
            if (mode := mode_of_result(name, self._flags)) is None:
                continue
            sign = 1 if mode == "max" else -1
            if math.isfinite(value) and sign * value > sign * self._best.get(
                name, -sign * math.inf
            ):
                self._best[name] = value
        self._results.write(scalar_messages(self._best), record["step"])

    def close(self) -> None:
        how = ending()
        if how != "stopped":  # a run that is resumed has not ended
            done = how == "finished"
            status = api_pb2.STATUS_SUCCESS if done else api_pb2.STATUS_FAILURE
            end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
            self._write(session_end_info=end)
        self._session.close()
        self._results.close()

    def _write(self, **info: Any) -> None:
        ((name, _),) = info.items()
        content = plugin_data_pb2.HParamsPluginData(**info).SerializeToString()
        value = {
            "tag": f"_hparams_/{name}",
            "tensor": tf.make_tensor_proto([], tf.float32),
            "metadata": {"plugin_data": {"plugin_name": "hparams", "content": content}},
        }
        self._session.write([value], 0)


def ending() -> Ending:
    """How the run ends, for a sink that is closed: by the exception that is on its way, if any."""
    error = sys.exc_info()[1]
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, Preempted | KeyboardInterrupt) else "failed"
