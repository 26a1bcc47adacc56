"""Which tests are run, and by which process. The fixtures are in `ctl_fixtures`."""

from __future__ import annotations

import os

import pytest
from paths import SUPPORT

TESTS = SUPPORT.parent

# Fixtures that start processes.
PROCESSES = {"job", "zygote", "zygote_without_tensorflow"}

# Tests of time limits: one at a time. Two would disturb each other. Of benchmarks, no test judges a
# duration.
TIMED = (
    *("chaos/", "distributed/", "doctor/", "inspect/test_run.py", "jobs/test_parameter_server.py"),
    *("test_launch.py", "test_train_workers.py"),
)
# Modules beside these that judge no duration.
UNTIMED = (
    *("distributed/cluster/test_clusters.py", "distributed/cluster/test_forkserver.py"),
    "distributed/test_multi_worker.py",
)


def pytest_addoption(parser):
    group = parser.getgroup("ctl", "how much of ctl is tested")
    group.addoption("--all", action="store_true", help="run all tests")
    group.addoption("--rest", action="store_true", help="run those that are not run by default")


def pytest_configure(config):
    """Without arguments, tests that are slow are left out, but for a sample. Processes of
    pytest-xdist learn of it by the environment. The one that starts them runs no test, so it need
    not import TensorFlow."""
    is_started = hasattr(config, "workerinput")
    if is_started or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("ctl_fixtures")
    if not is_started:
        chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        everything = chosen or config.getoption("all") or config.getoption("markexpr")
        how = "rest" if config.getoption("rest") else "all" if everything else "sample"
        os.environ["CTL_TESTS"] = how


def is_left_out(item) -> bool:
    return bool(item.get_closest_marker("slow")) and not item.get_closest_marker("sample")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    mark_processes(items)
    how = os.environ["CTL_TESTS"]
    if how != "all":
        sample = [item for item in items if not is_left_out(item)]
        rest = [item for item in items if is_left_out(item)]
        items[:], deselected = (rest, sample) if how == "rest" else (sample, rest)
        config.hook.pytest_deselected(items=deselected)


def mark_processes(items):
    """Tests that start processes are slow. Those of a module share what its fixtures make, so one
    process of pytest-xdist runs them; one runs all that are `TIMED` and not `UNTIMED`, and those of
    the sample, which share a `zygote`."""
    sample = os.environ["CTL_TESTS"] == "sample"
    for item in items:
        uses = PROCESSES & set(item.fixturenames)
        if uses:
            item.add_marker("slow")
        if uses or hasattr(item.module, "subprocess"):
            module = item.path.relative_to(TESTS).as_posix()
            timed = module.startswith(TIMED) and module not in UNTIMED
            together = timed or (sample and uses)
            group = "processes" if together else module
            item.add_marker(pytest.mark.xdist_group(group))
