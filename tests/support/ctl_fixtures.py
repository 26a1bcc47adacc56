"""Four logical CPU devices for the process that runs tests, and strategies over them."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal

import pytest

from ctl.base import console

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
console.load_tensorflow()  # in silence

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import logging  # noqa: E402
from graphs import freed_afterwards  # noqa: E402
from worker_jobs import start_job  # noqa: E402
from zygote import Zygote  # noqa: E402

from ctl.control import jit  # noqa: E402
from ctl.phases import apply  # noqa: E402

# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


# A graph has tens of thousands of objects. Python looks for garbage after 700, also among all that
# was imported: 6 % of the processor time of tests/test_step.py.
gc.freeze()
gc.set_threshold(20_000, 10, 10)


@functools.lru_cache
def mirrored_strategy(replicas: int, ring: bool = False) -> tf.distribute.Strategy:
    # Not the default cross-device operation: two of those in one process use the same collective
    # keys and fail. One strategy object per number of replicas serves every test.
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    return tf.distribute.MirroredStrategy(
        [f"/cpu:{i}" for i in range(replicas)],
        cross_device_ops=None if ring else tf.distribute.ReductionToOneDevice(),
    )


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory):
    """Processes of pytest-xdist share one, so that XLA compiles a program once."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["XDG_CACHE_HOME"] = str(shared / "cache")


@pytest.fixture(autouse=True, scope="module")
def what_tensorflow_keeps():
    """Collections of garbage need not look at what a module's tests have left."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def graphs_are_freed():
    with freed_afterwards():
        yield


@pytest.fixture(autouse=True)
def same_weights_in_every_run():
    """With other weights in each run, a gradient of nearly 0 now and then makes Adam magnify a
    rounding beyond every tolerance."""
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def xla_where_asked(request, monkeypatch):
    """To compile takes longer than most tests; `test_jit.py` has those of the rule."""
    monkeypatch.setattr(jit, "why_not", lambda step, dataset: "a test")
    if not request.node.get_closest_marker("compiled_update"):
        monkeypatch.setattr(apply, "is_compiled", lambda device: False)


@pytest.fixture(scope="session")
def mirrored():
    """``mirrored(n)``: a strategy over n logical CPU devices, the same object for the same n."""
    return mirrored_strategy


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    """Runs commands in processes that need not import TensorFlow."""
    modules = ["tensorflow", "keras", "tensorflow_datasets", "ctl.train", "ctl.evaluate"]
    modules += [
        "ctl.data",
        "ctl.loop",
        "ctl.jobs.models",
        "ctl.logs.sinks",
        "ctl.distributed.strategy",
        "warm_start",
    ]
    with contextlib.closing(Zygote(tmp_path_factory.mktemp("commands"), modules)) as started:
        yield started


@pytest.fixture(scope="session")
def job(zygote):
    """``with job(out, "fault=kill", workers=3) as processes:``, see `worker_jobs.start_job`."""
    return functools.partial(start_job, zygote)


@pytest.fixture(scope="session")
def zygote_without_tensorflow(tmp_path_factory):
    """Runs commands in processes in which importing TensorFlow is an error."""
    directory = tmp_path_factory.mktemp("commands_without_tensorflow")
    modules = ["ctl.train", "ctl.evaluate"]
    with contextlib.closing(Zygote(directory, modules, blocked=["tensorflow"])) as started:
        yield started


@pytest.fixture(scope="session")
def ring2():
    """The one strategy of the test process that uses real collectives: a ring of two devices."""
    return mirrored_strategy(2, ring=True)


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    """The warnings that absl logged."""
    monkeypatch.setattr(logging.get_absl_logger(), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
