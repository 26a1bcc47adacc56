"""The commands on runs in an object store, a server of S3: killed, stopped, without the server."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from object_stores import S3, s3_server
from zygote import last_line

from ctl.base import stores
from ctl.base.stores import open_store
from ctl.checkpoint import Reader

pytestmark = pytest.mark.slow  # starts processes

TRAIN = "ctl.train"
STEPS = 1000
FLAGS = [
    *("--model=dense", f"--train_steps={STEPS}", "--evaluate_every=500", "--checkpoint_every=50"),
    *("--steps_per_loop=5", "--optimizer=momentum", "--noexport"),
]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def machine(s3, tmp_path):
    """Gives the environment of another machine each time: its cache is empty."""
    numbers = iter(range(100))

    def make() -> dict[str, str]:
        cache = tmp_path / f"cache-{next(numbers)}"
        cache.mkdir(mode=0o700)
        return {**s3.environment, "XDG_CACHE_HOME": str(cache)}

    return make


@pytest.fixture(scope="module")
def on_a_disk(zygote, tmp_path_factory) -> Path:
    """An uninterrupted run."""
    model_dir = tmp_path_factory.mktemp("disk")
    zygote.run(TRAIN, f"--model_dir={model_dir}", *FLAGS)
    return model_dir


def committed(url: str) -> list[str]:
    names = open_store(url).list("checkpoints")
    return sorted(name.split("/")[1] for name in names if name.endswith("manifest.json"))


def assert_same_end(url: str, reference: Path) -> None:
    ours, theirs = Reader(url), Reader(reference)
    assert ours.saved.step == theirs.saved.step == STEPS
    assert [*ours] == [*theirs]
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.sample
def test_killed_while_it_copies_and_resumed_on_other_machines(zygote, machine, on_a_disk):
    url = "s3://runs/killed"
    drawn = random.Random(5)
    for kills in range(2):
        command = zygote.start(TRAIN, f"--model_dir={url}", *FLAGS, **machine())
        before, deadline = committed(url), time.monotonic() + 60
        while committed(url) == before and not zygote.ended(command):
            assert time.monotonic() < deadline, command.stderr
            time.sleep(0.01)
        time.sleep(drawn.uniform(0, 0.3))
        if not zygote.ended(command):
            command.signal(signal.SIGKILL)
            command.wait()
        stores.use(url, None)
        assert Reader(url).saved.step > 0, kills
    at = Reader(url).saved.step
    command = zygote.run(TRAIN, f"--model_dir={url}", *FLAGS, **machine())
    assert f"resuming at step {at} from" in command.stderr or at == STEPS
    assert f"checkpoints  {url}/checkpoints" in command.stdout
    assert_same_end(url, on_a_disk)

    # Readers, on other machines.
    (where,) = zygote.run(
        "ctl.evaluate", f"--model_dir={url}", "--json", **machine()
    ).stdout.splitlines()
    assert f"{url}/checkpoints/step-{STEPS:010d}" in where
    assert url in zygote.run("ctl.compare", url, on_a_disk, **machine()).stdout
    spent = zygote.run("ctl.inspect.commands.time_spent", url, **machine()).stdout
    assert "lost to failures" in spent and f"page: {url}/inspect/time.html" in spent
    assert open_store(url).size("inspect/time.html")
    started = zygote.run(
        *(TRAIN, "--model_dir=s3://runs/started", f"--init_from={url}", "--model=dense"),
        *("--train_steps=1", "--noexport"),
        **machine(),
    )
    assert f"weights are those of {url}" in started.stderr


def test_stopped_by_a_signal(zygote, machine):
    """Its settings are in the store before the first checkpoint."""
    rare = ["--train_steps=1000000", "--checkpoint_every=1000000", "--evaluate_every=1000000"]
    rare += ["--notensorboard"]
    url, endless = "s3://runs/stopped", [*FLAGS, *rare]
    command = zygote.start(TRAIN, f"--model_dir={url}", *endless, **machine())
    command.until("/1000000", stream="stdout")
    deadline = time.monotonic() + 20
    while not open_store(url).exists("config.json"):
        assert time.monotonic() < deadline, open_store(url).list()
        time.sleep(0.1)
    assert not committed(url)
    second = zygote.run(TRAIN, f"--model_dir={url}", *endless, exit_code=4, **machine())
    assert "s3://runs/stopped is being written by process" in last_line(second)
    command.signal(signal.SIGTERM)
    assert command.wait() == 42
    last = last_line(command)
    assert f"saved step {Reader(url).saved.step} in {url}/checkpoints/step-" in last


# Its process waits, as one whose device computes.
SLOW = """
import time

import ctl
import tensorflow as tf

class Slow(ctl.TrainStep):
    def loss(self, batch):
        tf.numpy_function(lambda: time.sleep(0.02), [], [])
        return super().loss(batch)
"""


def test_a_store_that_goes_down(zygote, machine, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    with s3_server() as server:
        url = "s3://runs/down"
        environment = {**machine(), **server.environment}
        command = zygote.start(
            *(TRAIN, f"--model_dir={url}", "--keep_trying=0.5", *FLAGS),
            *("--train_steps=1000000", "--evaluate_every=20", "--checkpoint_every=10"),
            *(f"--step={tmp_path}/slow.py:Slow", "--notensorboard"),
            **environment,
        )
        command.until("eval at step 20", stream="stdout")
        server.stop()
        assert command.wait() == 4
        assert "the training goes on, and tries again for 0.5 s" in command.stderr
        last = last_line(command)
        assert "(--keep_trying). What the store lacks is in" in last


def test_flags_that_have_no_effect(zygote, tmp_path):
    refused = zygote.run(
        TRAIN, f"--model_dir={tmp_path}", "--keep_trying=1", "--model=dense", exit_code=2
    )
    assert "--keep_trying is for a --model_dir in a store: leave it out" in last_line(refused)
