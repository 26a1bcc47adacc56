"""Does `python -m ctl.inspect hang` name the worker that hangs, and where?

  python -m tests.chaos.hang                           # 20 jobs with a frozen worker
  python -m tests.chaos.hang --faults=kill,raise,host,input,forward --runs=10

Each run is a job of real processes on loopback in which one worker, drawn at random, fails:

  freeze    SIGSTOP stops it at a random moment
  kill      SIGKILL kills it at a random moment
  raise     it raises an exception between two steps
  host      it sleeps between two steps
  input     it never gets its batch
  forward   its forward pass never ends

The other workers must end with exit code 5. The verdict over their records must name that worker
and no other, and say how it failed.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time

from absl import flags

from ctl import launch
from ctl.base import console
from ctl.errors import CtlError
from ctl.flags.parsing import group, run_command

from .run import progress

FLAGS = flags.FLAGS

# For each fault, what the verdict must say of the worker.
WORDS = {
    "kill": "gone: ",
    "raise": "gone: ",
    "freeze": r"frozen or dead: silent for \d+ s",
    "input": r"in input of training after step 5 for",
    "forward": r"in forward of training after step 5 for",
    "host": r"in the action Sleep after step 5 for",
}
_AT_STEP = 5


def worker(index: int, addresses: list[str], out: pathlib.Path, fault: str, timeout: float) -> None:
    """Trains until the process is killed; ``fault`` is "" on all workers but one."""
    import keras
    import numpy as np
    import tensorflow as tf

    import ctl
    from ctl.distributed.cluster import Cluster
    from ctl.distributed.strategy import make_multi_worker

    placement = make_multi_worker(
        Cluster(tuple(addresses), index, "tests.chaos"), collective_timeout=timeout, record_dir=out
    )

    def sleep(number: np.int64) -> np.int64:
        if number == _AT_STEP:
            time.sleep(1000)
        return number

    class Step(ctl.TrainStep):
        def preprocess(self, features: tf.Tensor) -> tf.Tensor:
            if fault != "forward":
                return features
            number = tf.numpy_function(sleep, [self.global_step], tf.int64)
            return features + tf.cast(tf.ensure_shape(number, []), tf.float32) * 0.0

    class Sleep:
        def __call__(self, status: ctl.actions.Status) -> None:
            (out / f"trains-{index}").touch()
            if fault == "raise":
                raise RuntimeError("a bug in a worker")
            if fault == "host":
                sleep(status.step)

    with placement.strategy.scope():
        model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64), keras.layers.Dense(4)])
        step = Step(model, keras.optimizers.SGD(0.01), options=placement.options)
    numbers = tf.data.Dataset.range(10**9)
    if fault == "input":
        numbers = numbers.map(lambda n: tf.numpy_function(sleep, [n], tf.int64))
    batch = 8 * len(addresses)
    data = numbers.map(lambda n: (tf.zeros([batch, 64]), tf.zeros([batch], tf.int64)))
    loop = ctl.Loop(
        step, data, strategy=placement.strategy, actions=[ctl.Every(Sleep(), steps=_AT_STEP)]
    )
    loop.train(10**9)


def start(*arguments: object) -> int:
    """Starts a process that runs `worker` and returns its id. It is forked after TensorFlow was
    imported, which saves seconds and is safe until the first operation."""
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with this one
    try:
        worker(*arguments)
    except CtlError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def one(fault: str, randoms: random.Random) -> tuple[bool, str]:
    """Runs one job. Returns whether the verdict is right, and its text or what went wrong."""
    from ctl.distributed.watch import hang
    from ctl.inspect.commands import hang as hang_command

    workers, late = FLAGS.workers, randoms.randrange(FLAGS.workers)
    addresses = launch.cluster(workers)["worker"]
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory)
        with open(out / "stderr", "w") as stderr:
            kept = os.dup(2)
            os.dup2(stderr.fileno(), 2)
            pids = [
                start(i, addresses, out, fault if i == late else "", FLAGS.collective_timeout)
                for i in range(workers)
            ]
            os.dup2(kept, 2)
            os.close(kept)
        try:
            deadline = time.monotonic() + FLAGS.timeout
            if fault in ("freeze", "kill"):
                while not all((out / f"trains-{i}").exists() for i in range(workers)):
                    if time.monotonic() > deadline:
                        raise CtlError(f"no training: {(out / 'stderr').read_text()[-500:]}")
                    time.sleep(0.05)
                time.sleep(randoms.uniform(0, 2))
                os.kill(pids[late], signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)
            others = [pid for i, pid in enumerate(pids) if i != late]
            codes = [_wait(pid, deadline) for pid in others]
        finally:
            for pid in pids:
                _end(pid)
        said = (out / "stderr").read_text()
        if codes != [5] * len(others):
            return False, f"exit codes {codes}: {said[-500:]}"
        verdict = hang.summary(hang_command.load(out)[0])
    named = re.findall(r"worker (\d+) \(", verdict)
    right = named == [str(late)] and re.search(WORDS[fault], verdict) is not None
    return right, verdict


def _wait(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def main() -> None:
    console.load_tensorflow()
    randoms = random.Random(FLAGS.seed)
    results: dict[str, dict[str, object]] = {}
    for fault in FLAGS.faults:
        wrong = []
        for run in range(FLAGS.runs):
            progress(f"{fault} {run + 1} of {FLAGS.runs}")
            right, verdict = one(fault, randoms)
            if not right:
                wrong.append(verdict)
                print(f"{fault}, run {run + 1}, wrong: {verdict}", flush=True)
        progress("")
        print(f"{fault:<8} {FLAGS.runs - len(wrong)} of {FLAGS.runs} right", flush=True)
        results[fault] = {"runs": FLAGS.runs, "right": FLAGS.runs - len(wrong), "wrong": wrong}
    print(f"the last verdict: {verdict}")
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps(results, indent=1))
        print(f"json: {FLAGS.json}")
    if any(result["wrong"] for result in results.values()):
        raise CtlError("some verdicts are wrong")


if __name__ == "__main__":
    with group("Runs"):
        flags.DEFINE_list("faults", ["freeze"], f"Of {', '.join(WORDS)}.")
        flags.DEFINE_integer("runs", 20, "Jobs for each fault.", lower_bound=1)
        flags.DEFINE_integer("workers", 3, "Workers of a job.", lower_bound=2)
        flags.DEFINE_float("collective_timeout", 6.0, "Of the jobs (seconds).", lower_bound=5)
        flags.DEFINE_float("timeout", 180.0, "Longest time of a job (seconds).")
        flags.DEFINE_integer("seed", 0, "Of who hangs, and when.")
        flags.DEFINE_string("json", None, "File for the results.")
    flags.register_validator(
        "faults", lambda names: set(names) <= set(WORDS), f"choose of {', '.join(WORDS)}"
    )
    run_command(main, __doc__)
