"""MLflow and Weights & Biases get what was logged, and none of them can stop a training.

.ci/run installs neither of them. To run all: ``pip install -e '.[mlflow,wandb]'``.
"""

from __future__ import annotations

import logging
import math
import struct
import sys
import threading
import types

import pytest
from records import record
from waiting import wait_until

from ctl.errors import CheckpointError, Preempted
from ctl.logs.trackers import MLflow, Tracker, WandB, add_keys, forget

FLAGS = {"optimizer": "adam", "learning_rate": 1e-3, "note": "x" * 9000}


class Service:
    """Takes what is sent, but breaks at ``broken``; waits for ``gate`` first."""

    def __init__(self, broken: float | None = None, gate: threading.Event | None = None):
        self.broken, self.gate, self.sent = broken, gate, []

    def write(self, record):
        if self.gate:
            self.gate.wait(60)
        if record["loss"] == self.broken:
            raise ConnectionError("no route\nto host")
        self.sent.append(record)

    def close(self, how):
        self.sent.append(how)


def test_records_come_in_order_and_the_end_says_how():
    service = Service()
    sink = Tracker("S", lambda: service)
    records = [record(step, loss=1 / step) for step in range(1, 50)]
    for each in records:
        sink.write(each)
    sink.close()
    assert service.sent == [*records, "finished"]
    stopped = Service()
    with pytest.raises(Preempted):
        try:
            raise Preempted("SIGTERM")
        finally:
            Tracker("S", lambda: stopped).close()
    assert stopped.sent == ["stopped"]


def test_a_service_that_fails_is_said_once(caplog):
    def unreachable():
        raise ConnectionError("no route\nto host")

    broken = Service(broken=2.0)
    for connect in (unreachable, lambda: broken):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="absl"):
            sink = Tracker("MLflow", connect)
            for step in range(1, 9):
                sink.write(record(step, loss=float(step)))
            sink.close()
            sink.write(record(9, loss=9.0))
        said = [each.getMessage() for each in caplog.records]
        assert said == [
            "MLflow: ConnectionError: no route to host; the training goes on without it"
        ]
    assert [each["step"] for each in broken.sent] == [1]


def test_a_slow_service_delays_no_step_and_the_end_only_for_some_time(caplog):
    gate = threading.Event()
    service = Service(gate=gate)
    with caplog.at_level(logging.WARNING, logger="absl"):
        sink = Tracker("W&B", lambda: service, patience=0.05)
        sink.write(record(1, loss=1.0))  # returns while the service waits for the gate
        sink.close()
    assert "not all was sent" in caplog.records[-1].getMessage() and service.sent == []
    gate.set()


def test_a_run_that_begins_anew_has_its_own_run_at_mlflow(tmp_path, monkeypatch):
    """Not that of an attempt that ended before its first checkpoint."""
    clients = []

    class Client:
        def __init__(self, tracking_uri):
            self.runs, self.metrics, self.resumed = len(clients), [], None
            clients.append(self)

        def get_experiment_by_name(self, name):
            return types.SimpleNamespace(experiment_id="1")

        def create_run(self, number, run_name):
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run {self.runs}"))

        def update_run(self, number, status):
            self.resumed = number

        def log_batch(self, number, metrics=(), params=()):
            self.metrics += metrics

    entities = types.SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    tracking = types.SimpleNamespace(MlflowClient=Client)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    MLflow("uri", tmp_path, FLAGS)
    MLflow("uri", tmp_path, FLAGS)
    assert clients[1].resumed == "run 0"
    forget(tmp_path)
    service = MLflow("uri", tmp_path, FLAGS)
    assert clients[2].resumed is None
    MLflow("uri", tmp_path, FLAGS)
    assert clients[3].resumed == "run 2"
    forget(tmp_path)
    forget(tmp_path)  # there is nothing to forget
    service.write(record(2, "eval", **{"loss": 1.0, "train[:9]/loss": 2.0, "a@b/loss": 3.0}))
    names = ["eval/loss", "eval/train_:9_/loss", "eval/a_b/loss"]
    assert clients[2].metrics == [(n, v, 1500, 2) for n, v in zip(names, (1, 2, 3), strict=True)]


def test_a_run_of_wandb_goes_on_with_its_id(tmp_path, monkeypatch):
    begun = []

    class Run:
        id = "run 0"

        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

    def init(**options):
        begun.append(options)
        return Run()

    wandb = types.SimpleNamespace(init=init, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        WandB("project", tmp_path, FLAGS)
    forget(tmp_path)
    WandB("project", tmp_path, FLAGS)
    assert [each["id"] for each in begun] == [None, "run 0", None]
    assert [each["resume"] for each in begun] == [None, "allow", None]
    assert begun[0]["config"] == FLAGS and begun[0]["settings"]["login_timeout"] == 10


def test_an_id_that_cannot_be_deleted_is_said(tmp_path):
    (tmp_path / MLflow.FILE).mkdir()
    with pytest.raises(CheckpointError, match=f"^cannot delete {tmp_path}/mlflow.json: Is a dir"):
        forget(tmp_path)


def test_names_that_mlflow_refuses():
    keys: dict[str, str] = {}
    for _ in range(2):  # the same in each record
        add_keys(keys, ["eval/a@b", "eval/a_b", "eval/a[b", "eval/t.-: 1"])
    assert keys == {
        "eval/a@b": "eval/a_b",
        "eval/a_b": "eval/a_b_2",
        "eval/a[b": "eval/a_b_3",
        "eval/t.-: 1": "eval/t.-: 1",
    }


def test_mlflow_has_flags_metrics_and_one_run_after_a_resume(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    uri, directory = f"sqlite:///{tmp_path}/store.db", tmp_path / "run"
    directory.mkdir()
    first = MLflow(uri, directory, FLAGS)
    first.write(record(1, loss=0.5))
    first.write(record(2, "eval", loss=0.25, accuracy=math.nan, **{"train[:9]/loss": 2.0}))
    first.close("stopped")
    client = tracking.MlflowClient(uri)
    (experiment,) = client.search_experiments(filter_string="name = 'ctl'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED" and run.info.run_name == "run"
    assert run.data.params == {"optimizer": "adam", "learning_rate": "0.001", "note": "x" * 500}
    resumed = MLflow(uri, directory, {**FLAGS, "learning_rate": 2e-3})
    assert client.get_run(run.info.run_id).info.status == "RUNNING"
    resumed.write(record(2, loss=0.125))
    resumed.close("finished")
    (run,) = client.search_runs([experiment.experiment_id])  # still one
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value, m.timestamp) for m in history] == [(1, 0.5, 1500), (2, 0.125, 1500)]
    assert run.data.metrics["eval/train_:9_/loss"] == 2.0
    assert run.data.metrics["eval/loss"] == 0.25 and math.isnan(run.data.metrics["eval/accuracy"])
    other = MLflow(f"sqlite:///{tmp_path}/other.db", directory, {})  # another store, a new run
    other.close("failed")
    assert len(client.search_runs([experiment.experiment_id])) == 1


def leveldb_records(log: bytes):
    """The records of a log of LevelDB, as a file of an offline run is, after a header of 7 bytes:
    https://github.com/google/leveldb/blob/main/doc/log_format.md"""
    at, record = 7, b""
    while at + 7 <= len(log):
        if at % 32768 > 32768 - 7:
            at += -at % 32768  # padding
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        if at + 7 + size > len(log):  # is being written
            return
        record += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # full, last
            yield record
            record = b""


def test_wandb_has_flags_metrics_and_one_run_after_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")

    def read(file):
        """Id and project, config, history and exit code, which comes last."""
        found, config, history, code = None, {}, [], None
        for data in leveldb_records(file.read_bytes()):
            message = wandb_internal_pb2.Record.FromString(data)
            if message.HasField("run"):
                found = message.run.run_id, message.run.project
                config |= {i.key: i.value_json for i in message.run.config.update}
            if message.HasField("history"):
                items = message.history.item
                history.append({i.key or "/".join(i.nested_key): i.value_json for i in items})
            if message.HasField("exit"):
                code = message.exit.exit_code
        return found, config, history, code

    def wrote(sent, how):
        """What a part of the run leaves for ``wandb sync``; its process may still write it."""
        before = set(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        run = WandB("project", tmp_path, FLAGS)
        for each in sent:
            run.write(each)
        run.close(how)
        (file,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - before
        wait_until(lambda: read(file)[-1] is not None)
        return read(file)

    first = wrote([record(1, loss=0.5), record(2, "eval", loss=0.25)], "stopped")
    again = wrote([record(1, loss=0.5)], "finished")  # the step falls
    assert first[0] == again[0] and first[0][1] == "project"
    assert first[1]["optimizer"] == '"adam"' and first[1]["learning_rate"] == "0.001"
    assert [(h["step"], h.get("train/loss")) for h in first[2]] == [("1", "0.5"), ("2", None)]
    assert first[2][1]["eval/loss"] == "0.25"
    assert [(h["step"], h["train/loss"]) for h in again[2]] == [("1", "0.5")]
    assert (first[3], again[3]) == (1, 0)
