"""Does an elastic job go on when workers are lost, and lose nothing that need not be lost?

    python -m tests.chaos.elastic                            # 3 losses
    python -m tests.chaos.elastic --losses=60 --seconds=52   # an hour
    python -m tests.chaos.elastic --workers=3..3             # the set stays: equal bits
    python -m tests.chaos.elastic --machines                 # a launcher for each worker
    python -m tests.chaos.elastic --network                  # machines are cut off; needs root

Starts `python -m ctl.launch --workers=2..4` with a `ctl.train`, whose only checkpoints are those
that survivors and stops make. While it trains, a worker drawn at random, also the chief, is killed,
freezes, hangs, or raises an error; lost ones are tried again after a while. With --pairs, a second
one is killed at the same moment. Checked is:

- the job goes on, whatever was lost, until SIGTERM ends it after the last loss; each loss costs the
  steps of a call at most;
- `metrics.jsonl` has each step once, but for one that the chief had no time to log, and
  `config.json` has each number of workers;
- the last weights are those of an undisturbed job of one worker up to rounding. The global batch,
  50, is shared unequally by three and by four, and BatchNorm normalizes over all replicas. If the
  number of workers does not change, weights have the bits of an undisturbed job of so many, with
  Dropout and a BatchNorm of each replica, too.

With --machines, each worker has a launcher, as on machines of their own, which find each other in a
directory. Launchers are killed, too, with their workers, and come back after a while. With
--network, each launcher has a network of its own (a namespace of Linux), and they meet at a port of
the first. The others are also cut off: launcher and worker go on, no packet comes or goes, and
after a while all do again.

Prints the seconds from each loss to the next logged step, the largest difference of a weight, and
the part of the time in which steps were trained that count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from ctl.errors import CtlError
from ctl.flags.parsing import group, run_command

FLAGS = flags.FLAGS

# What a worker gets: the last two make it hang, and raise an error, between two calls.
KINDS = {
    "kill": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "hang": signal.SIGUSR1,
    "raise": signal.SIGUSR2,
}
_LOG_EVERY, _CALL = 20, 5  # steps
_ROUNDING = 1e-3  # what it may have become after all steps
_MANY = 100_000_000  # steps: it is ended before
_LONGEST = 600.0  # seconds without a step after which a job hangs
_LONG_CUT = 30.0  # seconds, so that it is noticed
_STOPPED = 42  # the exit code of what a signal has ended
_RANKS = "CHAOS_RANKS"  # a directory, in which each worker writes its rank, by its process

if _RANKS in os.environ:  # a worker imports this before it meets the others
    _config = json.loads(os.environ["TF_CONFIG"])
    Path(os.environ[_RANKS], str(os.getpid())).write_text(str(_config["task"]["index"]))


def make(shape: tuple[int, ...], classes: int) -> object:
    """A model whose result does not depend on the number of replicas."""
    import keras

    return _model(shape, classes, [keras.layers.BatchNormalization(synchronized=True)])


def make_of_each(shape: tuple[int, ...], classes: int) -> object:
    """A model in which each replica normalizes its share, and draws its own masks."""
    import keras

    return _model(shape, classes, [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])


def _model(shape: tuple[int, ...], classes: int, layers: list) -> object:
    import keras

    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000.0))
    signal.signal(signal.SIGUSR2, lambda *_: 1 / 0)  # type: ignore[arg-type]
    first = [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(32, "relu")]
    return keras.Sequential([*first, *layers, keras.layers.Dense(classes)])


class Network:
    """Machines at a switch: namespaces of Linux, a context manager. Needs root and ``ip``."""

    def __init__(self, count: int):
        self._names = [f"ctlelastic{os.getpid()}-{index}" for index in range(count)]
        self._switch = f"ctlelastic{os.getpid()}-switch"

    def __enter__(self) -> Network:
        for name in (self._switch, *self._names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for index, name in enumerate(self._names):
            ends = ["wire", "netns", name, "type", "veth", "peer", "name", f"port{index}"]
            _ip("link", "add", *ends, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", f"port{index}", "master", "switch")
            _ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            self.connect(index)
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def address(self, index: int) -> str:
        return f"10.77.1.{index + 1}"

    def inside(self, index: int) -> list[str]:
        """What a command of this machine begins with."""
        return ["ip", "netns", "exec", self._names[index]]

    def connect(self, index: int, connected: bool = True) -> None:
        """Plugs a machine in, or out."""
        state = "up" if connected else "down"
        _ip("-n", self._switch, "link", "set", f"port{index}", state)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise CtlError(f"ip {' '.join(words)}: {done.stderr.strip()}; run this as root")


@dataclasses.dataclass
class Loss:
    """A worker that was lost: how, its rank, how many there were, the last step that was logged
    before, whether the chief was lost; the first step that was logged after, and the seconds in
    between."""

    kind: str
    rank: int
    workers: int
    before: int
    of_chief: bool
    seconds: float = 0.0
    resumed: int = 0


class Job:
    """A launcher that runs, and what it says."""

    def __init__(
        self,
        workers: str,
        model: str,
        model_dir: Path,
        steps: int = _MANY,
        network: Network | None = None,
        one_launcher: bool = False,
    ):
        data = ["--dataset=synthetic", "--num_examples=650", "--global_batch_size=50"]
        rate = ["--optimizer=momentum", "--learning_rate=0.01", "--schedule=constant"]
        length = [
            f"--train_steps={steps}",
            f"--evaluate_every={_MANY}",
            f"--steps_per_loop={_CALL}",
        ]
        writes = [f"--log_every={_LOG_EVERY}", f"--checkpoint_every={_MANY}", "--noexport"]
        training = [
            *(sys.executable, "-m", "ctl.train", "--strategy=multi_worker", "--notensorboard"),
            "--collective_timeout=10",
            *(f"--model_dir={model_dir}", f"--model={model}", *data, *rate, *length, *writes),
        ]
        launcher = [sys.executable, "-m", "ctl.launch", f"--workers={workers}"]
        launcher += [f"--max_restarts={FLAGS.losses}"]  # none is too many
        launcher += [f"--join_every={FLAGS.join_every}"]
        self._launch, self._train, self._network = launcher, training, network
        self._model_dir, self._stops = model_dir, False
        self._ranks = Path(f"{model_dir}-ranks")
        self._ranks.mkdir()
        self._board = f"{network.address(0)}:2200" if network else f"{model_dir}-board"
        self.steps: list[tuple[float, int]] = []  # when which step was logged
        self.resumed: list[int] = []
        self.said: list[str] = []
        self.cut: set[int] = set()  # machines that are, or were, cut off
        self._machines: dict[int, int] = {}  # by the process of the launcher
        self._apart = (FLAGS.machines or network) and not one_launcher
        count = int(workers.rpartition("..")[2]) if self._apart else 1
        self.launchers = [self.start(index) for index in range(count)]

    def _command(self, index: int) -> Sequence[str]:
        if self._network:
            address = self._network.address(index)
            place = [f"--rendezvous={self._board}", f"--address={address}"]
            launch = [*self._network.inside(index), *self._launch, *place]
        elif self._apart:
            place = [f"--rendezvous={self._board}", "--address=127.0.0.1"]
            launch = [*self._launch, *place]
        else:
            launch = self._launch
        return [*launch, "--", *self._train]

    def start(self, index: int) -> subprocess.Popen[str]:
        """Starts the launcher of a machine."""
        launcher = subprocess.Popen(
            self._command(index),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "CTL_JOB_SECRET": "of chaos", _RANKS: str(self._ranks)},
        )
        self._machines[launcher.pid] = index
        threading.Thread(target=self._read, args=(launcher,), daemon=True).start()
        return launcher

    def can_be_lost(self, launcher: subprocess.Popen[str]) -> bool:
        """Whether its machine can be: not the first, if that has the port of the rendezvous."""
        return not self._network or self._machines[launcher.pid] > 0

    def cut_off(self, launcher: subprocess.Popen[str], seconds: float) -> None:
        """Cuts the network of a machine for so many ``seconds``."""
        assert self._network
        index = self._machines[launcher.pid]
        self.cut.add(index)
        self._network.connect(index, False)
        timer = threading.Timer(seconds, self._network.connect, [index])
        timer.daemon = True
        timer.start()

    def lose(self, launcher: subprocess.Popen[str], seconds: float) -> None:
        """Kills a launcher with its worker. Its machine is back after so many ``seconds``."""
        launcher.kill()
        launcher.wait()
        self.launchers.remove(launcher)

        def back() -> None:
            if self.code() is None and not self._stops:
                self.launchers.append(self.start(self._machines[launcher.pid]))

        timer = threading.Timer(seconds, back)
        timer.daemon = True
        timer.start()

    def code(self) -> int | None:
        """The exit code of the job; None while it runs."""
        # One that is cut off at the end does not hear of it.
        there = [one for one in self.launchers if self._machines[one.pid] not in self.cut]
        codes = [launcher.poll() for launcher in there]
        return None if None in codes else max(map(abs, filter(None, codes)), default=0)

    def wait(self) -> int:
        """Waits for the end of the job, and returns its exit code."""
        while (code := self.code()) is None:
            time.sleep(0.05)
        return code

    def stop(self) -> int:
        """Asks the job to save and end, and returns the step at which it did.

        Raises:
            CtlError: it ended otherwise.
        """
        self._stops = True
        for launcher in self.launchers:
            launcher.terminate()
        if (code := self.wait()) != _STOPPED:
            raise CtlError(f"ended with {code}:\n" + "\n".join(self.said[-40:]))
        return max(int(path.name[5:]) for path in self._model_dir.glob("checkpoints/step-*"))

    def kill(self) -> None:
        """Kills all launchers, whose guards kill the workers."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()

    def _read(self, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stdout
        for line in launcher.stdout:
            self.said.append(line.rstrip())
            if found := re.search(r"\[worker 0\] step\s+(\d+)/", line):
                self.steps.append((time.monotonic(), int(found[1])))
            if found := re.search(r"\[worker 0\] resuming at step (\d+)", line):
                self.resumed.append(int(found[1]))
            if FLAGS.verbose or line.startswith("[launch]"):
                print(f"  {line.rstrip()}", flush=True)

    def workers(self) -> dict[int, tuple[int, subprocess.Popen[str]]]:
        """The process of each rank that runs, and its launcher."""
        found = {}
        launchers = {launcher.pid: launcher for launcher in [*self.launchers]}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in launchers:
                    rank = int((self._ranks / entry.name).read_text())
                    found[rank] = int(entry.name), launchers[parent]
        return found

    def wait_for_step(self, after: float) -> tuple[float, int] | None:
        """The first step that was logged ``after``; None if the job has ended.

        Raises:
            CtlError: there is none.
        """
        while self.code() is None:
            for at, step in self.steps:
                if at > after:
                    return at, step
            if time.monotonic() - after > _LONGEST:
                raise CtlError("no step for too long:\n" + "\n".join(self.said[-40:]))
            time.sleep(0.05)
        return None


@contextlib.contextmanager
def job(*arguments: object) -> Iterator[Job]:
    started = Job(*arguments)  # type: ignore[arg-type]
    try:
        yield started
    finally:
        started.kill()


def disturb(running: Job, losses: int, seconds: float, randoms: random.Random) -> list[Loss]:
    """Makes so many ``losses``, each of them ``seconds`` on average after the job has gone on."""
    made: list[Loss] = []
    since = time.monotonic()
    while len(made) < losses:
        if (found := running.wait_for_step(since)) is None:
            break
        time.sleep(randoms.uniform(0.2, 1.8) * seconds)
        workers = running.workers()
        if len(workers) < 2 or running.code() is not None:
            since = time.monotonic()
            continue
        rank = randoms.choice(sorted(workers))
        process, launcher = workers[rank]
        kinds = [*FLAGS.kinds]
        if not (FLAGS.machines or FLAGS.network) or not running.can_be_lost(launcher):
            kinds = [kind for kind in kinds if kind in KINDS]
        elif not FLAGS.network:
            kinds = [kind for kind in kinds if kind != "cut"]
        if not kinds:
            since = time.monotonic()
            continue
        loss = Loss(randoms.choice(kinds), rank, len(workers), running.steps[-1][1], rank == 0)
        count, since = len(running.resumed), time.monotonic()
        if loss.kind == "machine":
            running.lose(launcher, FLAGS.join_every)
        elif loss.kind == "cut":
            running.cut_off(launcher, max(FLAGS.join_every, _LONG_CUT))
        else:
            os.kill(process, KINDS[loss.kind])
        if len(workers) > 2 and randoms.random() < FLAGS.pairs:
            second = randoms.choice(sorted({*workers} - {rank}))
            os.kill(workers[second][0], signal.SIGKILL)
            loss.of_chief |= second == 0
            print(f"  and worker {second} is killed", flush=True)
        # Steps that were computed before may still be on their way to here.
        while len(running.resumed) == count and running.code() is None:
            time.sleep(0.05)
            if time.monotonic() - since > _LONGEST:
                raise CtlError("not resumed:\n" + "\n".join(running.said[-40:]))
        began = time.monotonic()
        if (found := running.wait_for_step(began)) is None:
            break
        loss.seconds, loss.resumed = found[0] - since, running.resumed[-1]
        made.append(loss)
        print(
            f"{loss.kind:<6} worker {loss.rank} of {loss.workers}: the last step seen was "
            f"{loss.before}, resumed at {loss.resumed} after {began - since:.1f} s, "
            f"a step after {loss.seconds:.1f} s",
            flush=True,
        )
    return made


def goodput(running: Job) -> float:
    """The part of the time from the first step to the last in which steps were trained that are in
    the final history."""
    counted, starts = 0.0, [0, *running.resumed]
    steps = running.steps
    for (one, first), (other, second) in zip(steps, steps[1:], strict=False):
        if 0 < second - first <= _LOG_EVERY and not any(first < s <= second for s in starts):
            counted += other - one
    return counted / (steps[-1][0] - steps[0][0])


def weights(model_dir: Path, step: int) -> dict[str, object]:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(model_dir / f"checkpoints/step-{step:010d}/variables"))
    names = [n for n in reader.get_variable_to_shape_map() if n.startswith(("model", "optimizer"))]
    return {name: reader.get_tensor(name) for name in names}


def check(disturbed: Path, other: Path, losses: list[Loss], steps: int) -> float:
    """Checks what must hold in the end. Returns the largest difference of a weight.

    Raises:
        CtlError: something does not hold.
    """
    import numpy as np

    for loss in losses:
        if loss.resumed < loss.before - _CALL:
            raise CtlError(f"{loss} lost more than a call")
    lines = [json.loads(line) for line in (disturbed / "metrics.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if line["phase"] == "train"]
    lacks = {*range(_LOG_EVERY, steps + 1, _LOG_EVERY)} - {*logged}
    of_chief = {loss.resumed for loss in losses if loss.of_chief}  # which had not yet logged it
    if logged != sorted({*logged}) or not lacks <= of_chief:
        raise CtlError(f"metrics.jsonl lacks {lacks}, or has a step twice: {logged}")
    counts = _workers(disturbed)
    print("workers, by config.json:", ", ".join(f"{c['count']} from {c['step']}" for c in counts))
    numbers = {loss.workers for loss in losses}
    if not numbers <= {count["count"] for count in counts}:
        raise CtlError(f"config.json does not have all of {numbers}")
    ours, theirs = weights(disturbed, steps), weights(other, steps)
    return max(float(np.abs(ours[n] - theirs[n]).max()) for n in theirs)  # type: ignore[operator]


def _workers(model_dir: Path) -> list[dict[str, int]]:
    """Each number of workers, and the step from which on there were so many."""
    return json.loads((model_dir / "config.json").read_text())["workers"]


def returns(model_dir: Path, losses: int) -> int:
    """How many lost workers came back: several may in one restart, also where another is lost."""
    counts = [entry["count"] for entry in _workers(model_dir)]
    return losses + counts[-1] - counts[0]


def main() -> None:
    randoms = random.Random(FLAGS.seed)
    with tempfile.TemporaryDirectory(prefix="ctl-elastic-") as name:
        directory = Path(name)
        directories = directory / "run", directory / "other"
        least, _, most = FLAGS.workers.partition("..")
        fixed = least == most
        model = f"tests.chaos.elastic:{'make_of_each' if fixed else 'make'}"
        with contextlib.ExitStack() as stack:
            network = None
            if FLAGS.network:
                network = stack.enter_context(Network(int(FLAGS.workers.rpartition("..")[2])))
            running = stack.enter_context(job(FLAGS.workers, model, directories[0], _MANY, network))
            losses = disturb(running, FLAGS.losses, FLAGS.seconds, randoms)
            time.sleep(FLAGS.seconds)
            steps = running.stop()
            alone = least if fixed else "1"
            with job(f"{alone}..{alone}", model, directories[1], steps, None, True) as undisturbed:
                if code := undisturbed.wait():
                    said = undisturbed.said[-9:]
                    raise CtlError(f"the undisturbed job ended with {code}:\n{said}")
            largest = check(*directories, losses, steps)
            print(f"losses: {len(losses)}, returns: {returns(directories[0], len(losses))}")
            print(f"restarts with another set: {len(running.resumed)}")
            seconds = running.steps[-1][0] - running.steps[0][0]
            print(f"steps: {steps} in {seconds:.0f} s, a loss each {seconds / len(losses):.0f} s")
            longest = max(loss.seconds for loss in losses)
            print(f"the longest time from a loss to a step: {longest:.1f} s")
            print(f"goodput: {goodput(running):.0%}")
            print(f"largest difference of a weight: {largest:.2g}")
            if largest > (0.0 if fixed else _ROUNDING):
                raise CtlError("the weights are not those of an undisturbed job")


if __name__ == "__main__":
    with group("Elastic chaos"):
        flags.DEFINE_string("workers", "2..4", "Least and most number of workers.")
        flags.DEFINE_integer("losses", 3, "How many workers are lost.", lower_bound=1)
        flags.DEFINE_float("seconds", 5.0, "Mean seconds of training before a loss.")
        flags.DEFINE_float("join_every", 60.0, "Seconds until a lost worker is tried again.")
        flags.DEFINE_integer("seed", 1, "Seed of what is drawn.")
        flags.DEFINE_list("kinds", [*KINDS, "machine", "cut"], "Which losses are drawn.")
        flags.DEFINE_float("pairs", 0.0, "At which part of losses a second worker is killed.")
        flags.DEFINE_bool("machines", False, "Whether each worker has a launcher.")
        flags.DEFINE_bool("network", False, "Whether each has a launcher on a network of its own.")
        flags.DEFINE_bool("verbose", False, "Whether to print all that the job says.")
    run_command(main, __doc__ or "")
