"""The flags and the best results, read with TensorBoard's own reader."""

from __future__ import annotations

import math
import os

import pytest
from records import points, record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from ctl.errors import CtlError, Preempted, UsageError
from ctl.logs.hparams import HParams, ending
from ctl.logs.runs import mode_of_result, read

FLAGS = {"optimizer": "adam", "learning_rate": 1e-3, "extend": False, "rates": ["1", "2"]}


def contents(directory):
    """What the HParams page reads of a run: its flags and how it ended."""
    events = EventAccumulator(str(directory)).Reload()
    found = events.PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(found[metadata.SESSION_START_INFO_TAG])
    end = found.get(metadata.SESSION_END_INFO_TAG)
    return start.hparams, end and metadata.parse_session_end_info_plugin_data(end).status


def test_flags_and_best_results_also_of_a_resumed_run(tmp_path):
    sink = HParams(tmp_path, FLAGS)
    sink.write(record(1, loss=0.0))  # not of an evaluation
    sink.write(record(2, "eval", loss=0.5, accuracy=0.5))
    sink.write(record(4, "eval", loss=math.nan, accuracy=0.75))
    sink.write(record(6, "eval", loss=0.75, accuracy=0.25))
    with pytest.raises(Preempted):
        try:
            raise Preempted("SIGTERM")
        finally:
            sink.close()
    values, status = contents(tmp_path)
    assert values["optimizer"].string_value == "adam" and status is None
    assert values["learning_rate"].number_value == 1e-3
    assert values["extend"].bool_value is False and values["rates"].string_value == "['1', '2']"
    assert points(tmp_path / "best")["loss"] == [(2, 0.5), (4, 0.5), (6, 0.5)]
    assert points(tmp_path / "best")["accuracy"] == [(2, 0.5), (4, 0.75), (6, 0.75)]
    resumed = HParams(tmp_path, FLAGS, {"loss": 0.5, "accuracy": 0.75})
    resumed.write(record(8, "eval", loss=0.25, accuracy=0.5))
    resumed.close()
    assert points(tmp_path / "best")["loss"][-1] == (8, 0.25)
    assert points(tmp_path / "best")["accuracy"][-1] == (8, 0.75)
    assert contents(tmp_path)[1] == api_pb2.STATUS_SUCCESS


def test_the_best_is_what_the_flags_say(tmp_path):
    sink = HParams(tmp_path, {"best_metric": "perplexity", "best_mode": "max"})
    for step, value in enumerate([2.0, 3.0, 1.0]):
        sink.write(record(step, "eval", perplexity=value))
    sink.close()
    assert points(tmp_path / "best")["perplexity"][-1] == (2, 3.0)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, {"mnist@test/auc": 2, "accuracy": 2, "test/loss": 1, "mae": 1}),
        ({"best_metric": "accuracy", "best_mode": "min", "early_stop": "up:5"}, {"accuracy": 2}),
        ({"best_metric": "accuracy", "best_mode": "max", "early_stop": "up:5"}, {"up": 2}),
        ({"best_metric": "auc", "best_mode": "max", "early_stop": "up:5:min"}, {"up": 1, "auc": 2}),
        ({"best_metric": "mae", "best_mode": "max", "early_stop": None}, {"mae": 2, "up": 0}),
        ({}, {"AUC": 2, "R2Score": 2, "acc": 2, "top1": 2, "MeanAbsoluteError": 1, "bleu": 0}),
        ({"early_stop": 5, "best_metric": []}, {"accuracy": 2}),
    ],
    ids=str,
)
def test_what_is_best(flags, names):
    modes = {"min": 1, "max": 2, None: 0}
    assert {name: modes[mode_of_result(name, flags)] for name in names} == names


def test_a_pipe_in_the_place_of_a_log(tmp_path):
    (tmp_path / "config.json").write_text('{"schema": 1, "flags": {}}')
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("error", "how"),
    [(Preempted(""), "stopped"), (KeyboardInterrupt(), "stopped"), (CtlError(""), "failed")],
)
def test_how_a_run_ends(error, how):
    assert ending() == "finished"
    try:
        raise error
    except BaseException:
        assert ending() == how


def test_where_no_file_can_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CtlError, match="cannot write events to ") as raised:
        HParams(tmp_path / "file" / "run", FLAGS)
    assert "\n" not in str(raised.value)
