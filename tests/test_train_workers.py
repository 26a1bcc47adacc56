"""The binary on several workers: the command of its page, and what a user sees when it fails."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time

import pytest
from paths import ROOT
from runs import records

from ctl import launch

pytestmark = pytest.mark.slow  # starts processes

TRAIN = "ctl.train"
SHORT = [
    *("--dataset=synthetic", "--num_examples=640", "--model=dense"),
    *("--train_steps=20", "--log_every=10", "--noexport"),
]


def tf_config(workers: list, index: int, kind: str = "worker") -> str:
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": kind, "index": index}})


def test_the_command_of_the_readme(tmp_path):
    """A bare ``ctl.launch``, with fewer steps. The chief speaks, every worker keeps a log."""
    readme = (ROOT / "ctl/distributed/cluster/README.md").read_text(encoding="utf-8")
    (line,) = re.findall(
        r"^python (-m ctl\.launch .*strategy=multi_worker .*ctl-workers)$", readme, re.M
    )
    line = re.sub(r"--model_dir=\S+", f"--model_dir={tmp_path}", line)
    command = [sys.executable if word == "python" else word for word in shlex.split(line)]
    ended = subprocess.run(
        [sys.executable, *command, *SHORT, "--export"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = [line for line in ended.stdout.splitlines() if not line.startswith("[worker 0]")]
    assert said == []  # progress and the result are the chief's
    assert len(re.findall(r"test  .*accuracy \d", ended.stdout)) == 1
    assert [(r["phase"], r["step"]) for r in records(tmp_path)] == [
        *(("train", 10), ("eval", 10)),
        *(("train", 20), ("eval", 20)),
    ]
    for phase in ("train", "eval"):
        assert len(list((tmp_path / phase).glob("events.*"))) == 1
    names = {p.name for p in tmp_path.iterdir() if not p.name.startswith("events.")}
    assert names == {
        *("best", "checkpoints", "config.json", "eval", "export", "metrics.jsonl", "train"),
        *("worker-0.log", "worker-1.log", "flags.txt", "summary.svg"),
        *("time-worker-0.jsonl", "time-worker-1.jsonl"),
    }
    for index in range(2):
        log = (tmp_path / f"worker-{index}.log").read_text().splitlines()
        assert f"worker {index} of 2" in log[1] and len(log) < 20
        assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d.\d{3}Z ", line) for line in log)


# tests/distributed/cluster/test_cluster.py has more.
WRONG = {
    "no address": (tf_config(["127.0.0.1:1", ""], 1), "TF_CONFIG: '' is not HOST:PORT"),
    "no cluster": ('{"task": {"type": "worker", "index": 0}}', "'cluster'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_tf_config_is_one_line(zygote_without_tensorflow, tmp_path, wrong):
    config, words = WRONG[wrong]
    flags = [f"--model_dir={tmp_path}", "--strategy=multi_worker"]
    command = zygote_without_tensorflow.run(TRAIN, *flags, exit_code=2, TF_CONFIG=config)
    assert words in command.stderr and len(command.stderr.splitlines()) == 1


def start(zygote, model_dir, addresses: list[str], index: int, *flags: str, **kwargs):
    return zygote.start(
        TRAIN,
        *(f"--model_dir={model_dir}", "--strategy=multi_worker", *SHORT, *flags),
        TF_CONFIG=tf_config(addresses, index),
        **kwargs,
    )


def test_a_port_in_use(zygote, tmp_path):
    """The other worker is told by the absence of this one."""
    addresses = launch.cluster(2)["worker"]
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(addresses[1].rpartition(":")[2])))
        taken.listen()
        peer = start(zygote, tmp_path, addresses, 0, "--startup_timeout=2")
        command = start(zygote, tmp_path, addresses, 1)
        assert command.wait() == 5
        line = command.stderr.splitlines()[-1]
        assert line.startswith(f"worker 1 cannot listen on {addresses[1]}: Address already in use")
        assert "Traceback" not in command.stderr
        assert peer.wait(60) == 5
    last = peer.stderr.splitlines()[-1]
    assert re.search(rf"gave up after \d+ s .* waiting for worker 1 at {addresses[1]}", last)


def test_nobody_waits_for_the_export_of_the_chief(zygote, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, time, keras\n"
        "class Slow(keras.Sequential):\n"
        "    def save(self, path):\n"
        f"        while not os.path.exists('{tmp_path}/go'):\n"
        "            time.sleep(0.1)\n"
        "        super().save(path)\n"
        "def make(shape, classes):\n"
        "    layers = [keras.layers.Flatten(), keras.layers.Dense(classes)]\n"
        "    return Slow([keras.Input(shape), *layers])\n"
    )
    flags, addresses = ["--model=slow:make", "--export"], launch.cluster(2)["worker"]
    run = tmp_path / "run"
    chief, worker = [
        start(zygote, run, addresses, index, *flags, path=[tmp_path]) for index in range(2)
    ]
    assert worker.wait() == 0
    assert not zygote.ended(chief)
    (tmp_path / "go").touch()
    assert chief.wait() == 0
    assert sorted(p.name for p in (run / "export").iterdir()) == ["model.keras", "saved_model"]


def test_a_full_disk_on_the_chief(zygote, tmp_path):
    addresses = launch.cluster(2)["worker"]
    flags = ["--checkpoint_every=10", "--train_steps=100000"]
    chief = start(zygote, tmp_path, addresses, 0, *flags, file_limit=1 << 20)
    worker = start(zygote, tmp_path, addresses, 1, *flags)
    assert chief.wait() == 4
    began = time.monotonic()
    assert worker.wait() == 5
    assert time.monotonic() - began < 25
    assert re.search(
        r"^No space left to save the checkpoint of step \d+ .*free \S+ MiB or choose another",
        chief.stderr.splitlines()[-1],
    )
    last = worker.stderr.splitlines()[-1]
    assert re.search(
        r"^worker 1 of 2: .* after step \d+ broke off: .*waiting for worker 0 \(", last
    )
    assert last in (tmp_path / "worker-1.log").read_text()
