"""Does a save to a store stop the loop for longer than one to the disk?

    python benchmarks/store_saves.py
    python benchmarks/store_saves.py --megabytes=500 --store=file:///mnt/other/runs

Two managers of one process save the same state in turns, one to the disk, one to the store, while a
loop updates all of the state at every step, in one thread. By default, the store is a server of S3
(moto) in a process of this machine, so its work takes time of the same processors. README.md says
how the numbers are derived.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from absl import flags
from processes import machine, progress, summary, write

from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command

with group("What is saved"):
    _MEGABYTES = flags.DEFINE_float("megabytes", 100.0, "size of the state, in 10^6 bytes")
    _VARIABLES = flags.DEFINE_integer("variables", 20, "variables that it is made of")
    _STORE = flags.DEFINE_string("store", None, "URL of a folder; a server of S3 by default")
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 15, "saves of each", lower_bound=1)
    _JSON = flags.DEFINE_string("json", None, "file for the results")

_SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
import sys
sys.stdin.read()
"""
_WHERE = ("disk", "store")
_TIMES = ("stands_still", "delay")


@contextlib.contextmanager
def a_store() -> Iterator[str]:
    """The URL of a folder for this run."""
    if _STORE.value:
        yield f"{_STORE.value}/{os.getpid()}"
        return
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout
        place = ":".join(server.stdout.readline().split())
        if not place:
            raise UsageError("the server of S3 needs pip install 'moto[server]' s3fs")
        os.environ |= {"AWS_ENDPOINT_URL": f"http://{place}", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        import botocore.session

        botocore.session.Session().create_client("s3").create_bucket(Bucket="runs")
        yield "s3://runs/saves"
    finally:
        server.kill()
        server.communicate()


def measure(directory: Path, url: str) -> list[dict[str, dict[str, float]]]:
    """Returns ``[{where: {time: seconds}}, ...]``."""
    import tensorflow as tf

    import ctl

    tf.config.threading.set_intra_op_parallelism_threads(1)
    each = max(1, round(_MEGABYTES.value * 1e6 / 4 / _VARIABLES.value))
    variables = [tf.Variable(tf.ones([each])) for _ in range(_VARIABLES.value)]
    step_of = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def train() -> None:
        for variable in variables:
            variable.assign_add(tf.ones([each]) * 1e-3)
        step_of.assign_add(1)

    state = {"model": variables, "counters": [step_of]}
    places = {"disk": str(directory), "store": url}
    managers = {w: ctl.CheckpointManager(places[w], keep=1) for w in _WHERE}

    def steps(seconds: float) -> list[float]:
        """The times of steps, for so long."""
        times, end = [], time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            begin = time.perf_counter()
            train()
            step_of.numpy()
            times.append(time.perf_counter() - begin)
        return times

    def copied(where: str) -> float:
        """Seconds of a save, until it is where it belongs."""
        begin = time.perf_counter()
        managers[where].save(int(step_of.numpy()), state, wait=True)
        return time.perf_counter() - begin

    def save(where: str, window: float) -> dict[str, float]:
        """One save during training, and what it costs the loop in the next ``window`` seconds."""
        usual = steps(window)
        begin = time.perf_counter()
        managers[where].save(int(step_of.numpy()), state)
        stands_still = time.perf_counter() - begin
        after = steps(window)
        a_step = sum(usual) / len(usual)
        delay = stands_still + sum(after) - len(after) * a_step
        managers[where].flush()
        return {"stands_still": stands_still, "delay": delay}

    for where in _WHERE:  # what is done once
        train()
        copied(where)
    train()
    window = 1.5 * max(copied(where) for where in _WHERE)  # all is copied in it
    rounds = []
    for number in range(_ROUNDS.value):
        progress(f"{number}/{_ROUNDS.value}, a window of {window:.1f} s")
        order = _WHERE if number % 2 == 0 else _WHERE[::-1]  # neither always goes first
        rounds.append({where: save(where, window) for where in order})
    progress("")
    for manager in managers.values():
        manager.close()
    return rounds


def main() -> None:
    about = machine(os.getloadavg()[0])
    print("  ".join(f"{key}={value}" for key, value in about.items()), end="\n\n")
    with tempfile.TemporaryDirectory() as folder, a_store() as url:
        os.environ["XDG_CACHE_HOME"] = folder  # the same disk for both
        os.chmod(folder, 0o700)
        later = measure(Path(folder) / "disk", url)
    seconds = {w: {t: summary([r[w][t] for r in later]) for t in _TIMES} for w in _WHERE}
    titles = ("stands still", "delay")
    print(f"{'':8}" + "".join(f"{title:>26}" for title in titles))
    for where in _WHERE:
        cells = [seconds[where][t] for t in _TIMES]
        texts = [
            f"{1e3 * c['median']:.0f} ({1e3 * c['min']:.0f}-{1e3 * c['max']:.0f}) ms" for c in cells
        ]
        print(f"{where:8}" + "".join(f"{text:>26}" for text in texts))
    still = summary([r["store"]["stands_still"] / r["disk"]["stands_still"] for r in later])
    print(
        f"store / disk, stands still: {still['median']:.2f} ({still['min']:.2f}-{still['max']:.2f})"
    )
    write(_JSON.value, {"machine": about, "rounds": later})


if __name__ == "__main__":
    run_command(main, __doc__)
