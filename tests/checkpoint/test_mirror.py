"""Checkpoints in object stores: the promises of a disk."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from object_stores import s3_server
from paths import ROOT

from ctl.base import stores
from ctl.base.stores import NothingThere, open_store
from ctl.checkpoint import CheckpointManager, Reader, load_weights, mirror
from ctl.checkpoint import manager as manager_module
from ctl.checkpoint.mirror import Mirror
from ctl.errors import CheckpointError

pytest.importorskip("fsspec")
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch) -> None:
    """No pauses, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(mirror, "_LONGEST_PAUSE", 0.02)


@pytest.fixture(params=["memory", "s3"])
def url(request, tmp_path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
    return f"{'memory:/' if request.param == 'memory' else 's3://runs'}/{tmp_path.name}/run"


@pytest.fixture
def state() -> dict[str, list[tf.Variable]]:
    return {"model": [tf.Variable(tf.random.normal([50, 3]))], "counters": [tf.Variable(0)]}


def forget_cache(tmp_path: Path) -> None:
    """As on another machine."""
    shutil.rmtree(tmp_path / "cache/ctl", ignore_errors=True)


def change(state: dict[str, list[tf.Variable]], step: int) -> np.ndarray:
    state["model"][0].assign(tf.fill([50, 3], float(step)) / 3)
    state["counters"][0].assign(step)
    return state["model"][0].numpy()


def test_another_machine_goes_on_and_retention_deletes(url, state, tmp_path):
    values = {}
    with CheckpointManager(url, keep=2, keep_best=1) as manager:
        for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.6)):
            values[step] = change(state, step)
            manager.save(step, state)
            manager.annotate(step, {"accuracy": accuracy})
            assert manager.shown(manager.directory / "x") == f"{url}/x"
    names = open_store(url).list()
    assert {n.split("/")[0] for n in names if n.startswith("step-")} == {
        f"step-{step:010d}" for step in (2, 3, 4)
    }
    forget_cache(tmp_path)
    state["model"][0].assign(tf.zeros([50, 3]))
    with CheckpointManager(url, keep=2, keep_best=1) as manager:
        saved = manager.restore(state)
        assert saved.step == 4 and saved.metrics["accuracy"] == 0.6
        np.testing.assert_array_equal(state["model"][0].numpy(), values[4])
        assert not list(manager.directory.glob("step-0000000003/variables*"))  # not needed
        manager.read(state, "best")
        np.testing.assert_array_equal(state["model"][0].numpy(), values[2])
        change(state, 5)
        manager.save(5, state, wait=True)
        assert "step-0000000005/manifest.json" in open_store(url).list()
    steps = {n.split("/")[0] for n in open_store(url).list() if n.startswith("step-")}
    assert steps == {f"step-{step:010d}" for step in (2, 4, 5)}


def test_readers_take_urls(url, state, tmp_path):
    with CheckpointManager(f"{url}/checkpoints") as manager:
        expected = change(state, 7)
        manager.save(7, state)
        change(state, 8)
        manager.save(8, state)
    forget_cache(tmp_path)
    for place in (f"{url}/checkpoints/step-0000000007", f"{url}/checkpoints/step-0000000007/"):
        reader = Reader(place)
        np.testing.assert_array_equal(reader[next(iter(reader))], expected)
    assert Reader(url).saved.step == Reader(f"{url}/checkpoints").saved.step == 8
    with CheckpointManager(f"{url}/checkpoints", read_only=True) as manager:
        assert manager.latest().step == 8 and manager.wait_for_new(8, 0) is None
    with pytest.raises(NothingThere, match="there is nothing"):
        Reader(f"{url}/nothing")
    # As on a disk, and so a copy of the store is one.
    stores.copy(open_store(url), open_store(url).list(), tmp_path / "copy")
    assert Reader(tmp_path / "copy").saved.step == 8


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_reader_brings_only_what_grows(url):
    """It looks each second, beside a run."""
    store, reads = open_store(url), []
    for name in ("config.json", "metrics.jsonl"):
        store.write(name, b"1")
    with Mirror(url, writes=False) as reader:
        read = reader._store.read
        reader._store.read = lambda name, *a: (reads.append(name), read(name, *a))[1]
        store.write("metrics.jsonl", b"12")
        reader.refresh()
        assert (reader.directory / "metrics.jsonl").read_bytes() == b"12"
    assert [name for name in reads if "latest" not in name] == ["metrics.jsonl"]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_weights_of_a_file(url, tmp_path):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.save(tmp_path / "model.keras")
    open_store(url).upload("export/model.keras", tmp_path / "model.keras")
    other = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    load_weights(other, f"{url}/export/model.keras")
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_damaged_checkpoint_is_passed_over(url, state, tmp_path):
    with CheckpointManager(url) as manager:
        for step in (1, 2):
            expected = change(state, 1)
            manager.save(step, state)
    store, name = open_store(url), "step-0000000002/variables.data-00000-of-00001"
    data = store.read(name)
    store.write(name, bytes([data[0] ^ 1]) + data[1:])
    forget_cache(tmp_path)
    assert Reader(url).saved.step == 1
    with CheckpointManager(url) as manager:
        assert manager.restore(state).step == 1
        np.testing.assert_array_equal(state["model"][0].numpy(), expected)
        manager.save(2, state)
    assert Reader(url).saved.step == 2


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_what_the_cache_has_besides_is_of_no_run(url, state):
    with CheckpointManager(url) as manager:
        manager.save(1, state)
    shutil.copytree(manager.directory / "step-0000000001", manager.directory / "step-0000000009")
    requests = []
    with CheckpointManager(url) as manager:
        requests.append(manager._mirror._store.requests)
        assert manager.restore(state).step == 1
        assert [path.name for path in manager.directory.glob("step-*")] == ["step-0000000001"]
        assert manager._mirror._store.requests - requests[0] <= 1  # the cache has the weights


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_later_manager_of_the_process_takes_over(url, state):
    first = CheckpointManager(url)
    first.save(1, state)
    with CheckpointManager(url) as second:
        assert second.restore(state).step == 1
        with pytest.raises(CheckpointError, match="a later CheckpointManager has taken it over"):
            first.save(2, state)
        second.save(2, state)
    assert Reader(url).saved.step == 2


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_run_that_is_deleted_is_not_written_on(url, state):
    manager, store = CheckpointManager(url), open_store(url)
    manager.save(1, state, wait=True)
    store.delete(store.list())
    with pytest.raises(CheckpointError, match="was deleted meanwhile"):
        manager.save(2, state, wait=True)
    with pytest.raises(CheckpointError, match="was deleted meanwhile"):
        manager.close()
    assert not open_store(url).list()


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_other_runs_below_the_url_are_left_alone(url, state, tmp_path):
    """Nor is anything written beside the directory of this machine."""
    store, other = open_store(url), {}
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.save(9, state)
    for place in ("other/checkpoints", "other", "../../.."):
        for file in (tmp_path / "disk/step-0000000009").iterdir():
            other[f"{place}/step-0000000009/{file.name}"] = file.read_bytes()
    for name, data in other.items():
        store._fs.pipe_file(store._place(name), data)
    with CheckpointManager(f"{url}/checkpoints") as first, Mirror(url) as whole:
        first.save(1, state)
        first.save(2, state)
        assert not list(whole.directory.rglob("step-0000000009"))
    with Mirror(url) as again:
        again.own()
        shutil.rmtree(again.directory / "checkpoints/step-0000000001")
        again.flush()
        assert not [*(tmp_path / "cache").rglob("step-0000000009")]
    names = store.list()
    assert "checkpoints/step-0000000002/manifest.json" in names
    assert "checkpoints/step-0000000001/manifest.json" not in names
    assert {name: store._fs.cat_file(store._place(name)) for name in other} == other


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_it_owns_the_run_when_it_has_seen_what_is_there(url, monkeypatch):
    """Before, its thread could delete what another one has finished meanwhile. A try that fails is
    not waited for."""
    with Mirror(url) as run:
        bring, numbers = run._bring_manifests, []

        def fail_once(names):
            numbers.append(run._number)
            if len(numbers) == 1:
                raise stores.StoreError("no")
            return bring(names)

        monkeypatch.setattr(run, "_bring_manifests", fail_once)
        with pytest.raises(stores.StoreError):
            run.own()
        run.own()
        assert numbers == [0, 0] and run._number == 2


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_settings_are_there_before_the_checkpoint(url, state, monkeypatch):
    """A kill between the two would leave a run that cannot go on."""
    seen = []
    with Mirror(url) as run:
        (run.directory / "config.json").write_text("{}")
        commit = run._commit
        monkeypatch.setattr(
            run, "_commit", lambda *a: (seen.append(open_store(url).list()), commit(*a))[1]
        )
        with CheckpointManager(run.directory / "checkpoints") as manager:
            manager.save(1, state)
    assert "config.json" in seen[0]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_cache_that_cannot_be_written(url, monkeypatch):
    monkeypatch.setattr(mirror.durable, "Lock", lambda path: mirror.os.open("/proc/no", 1))
    with pytest.raises(CheckpointError, match=f"the files of {url} on this machine, .* XDG_CACHE"):
        Mirror(url)


def test_one_process_writes(url, state, monkeypatch):
    monkeypatch.setattr(mirror, "LEASE", 1.0)
    monkeypatch.setattr(mirror, "_has_left", lambda data: b'"left": true' in data)
    with Mirror(url) as first:
        first.own()
        with Mirror(url) as other:
            with pytest.raises(CheckpointError, match="is being written by process .*; stop that"):
                other.own()
            first._renew = None  # as if frozen: its thread goes on, its object does not
            store = first._store
            monkeypatch.setattr(first, "_is_owner", lambda: False)
            threading.Event().wait(0.5)
            other.own()  # after the lease
            monkeypatch.undo()
            assert store is first._store
            folder = first.directory
            (folder / "step-0000000001").mkdir()
            (folder / "step-0000000001/variables.index").write_bytes(b"x")
            (folder / "step-0000000001/manifest.json").write_text(
                json.dumps({"files": {"variables.index": {"size": 1}}})
            )
            with pytest.raises(CheckpointError, match="is being written by process"):
                first.flush()
            assert not [n for n in open_store(url).list() if n.startswith("step-")]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_training_goes_on_until_keep_trying_ends(url, state, monkeypatch):
    failing = OSError(28, "No space left on device")

    def fail(*arguments, **keywords):
        if failing:
            raise failing

    with CheckpointManager(url, keep_trying=1e4) as manager:
        filesystem = manager._mirror._store._fs
        write = filesystem.pipe_file
        monkeypatch.setattr(filesystem, "pipe_file", fail)
        for step in (1, 2, 3):
            manager.save(step, state)
            manager.check()
        while manager._mirror._failing_since is None:
            threading.Event().wait(0.01)
        assert "step-0000000003/manifest.json" not in open_store(url).list()
        monkeypatch.setattr(filesystem, "pipe_file", write)
        manager.flush()
        assert "step-0000000003/manifest.json" in open_store(url).list()
        manager._mirror._keep_trying = 0.05
        monkeypatch.setattr(filesystem, "pipe_file", fail)
        with pytest.raises(CheckpointError, match=r"No space left .*\(--keep_trying\). What the"):
            manager.save(4, state, wait=True)
        with pytest.raises(CheckpointError, match="keep_trying"):
            manager.check()
        monkeypatch.setattr(filesystem, "pipe_file", write)
        with pytest.raises(CheckpointError, match="keep_trying"):
            manager.close()
    assert Reader(url).saved.step == 3
    # What the store lacks is a run as on a disk.
    kept = manager._mirror.directory
    with CheckpointManager(str(kept), read_only=True) as disk:
        assert disk.latest().step == 4


@pytest.fixture
def unsent(url, state, monkeypatch) -> Path:
    """The directory of a writer that was killed while its store failed: 1 is there, 2 is not."""
    store = open_store(url)
    manager = CheckpointManager(url)
    manager.save(1, state, wait=True)
    copies = threading.Event()
    with monkeypatch.context() as failing:
        failing.setattr(manager._mirror, "_copy", lambda: (copies.set(), threading.Event().wait()))
        (manager.directory / "metrics.jsonl").write_text("2\n")
        change(state, 2)
        manager.save(2, state)
        manager.wait()
        assert copies.wait(30)
    manager._lock.release()
    manager._mirror._lock.release()
    (owner,) = store.list("owner")
    store.write(owner, store.read(owner).replace(b'"left": false', b'"left": true'))
    mirror._open.clear()
    manager_module._writers.clear()
    return manager.directory


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_what_was_not_copied_is_copied_by_the_next_start(url, state, unsent, monkeypatch):
    """By the chief: a later worker leaves it alone."""
    assert "step-0000000002/manifest.json" not in open_store(url).list()
    task = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    with monkeypatch.context() as later:
        later.setenv("TF_CONFIG", json.dumps(task))
        with Mirror(url) as other:
            assert other.directory != unsent
    state["model"][0].assign(tf.zeros([50, 3]))
    with CheckpointManager(url) as manager:
        assert manager.directory == unsent and manager.restore(state).step == 2
        np.testing.assert_array_equal(state["model"][0], tf.fill([50, 3], 2.0) / 3)
    assert Reader(url).saved.step == 2 and open_store(url).read("metrics.jsonl") == b"2\n"
    assert not (unsent / ".unsent").exists()


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_what_was_not_copied_is_copied_after_a_try_that_failed(url, unsent, monkeypatch):
    with Mirror(url) as run:
        with monkeypatch.context() as failing:
            failing.setattr(run, "_bring_manifests", lambda names: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run.own()
        run.own()
    assert Reader(url).saved.step == 2


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_what_was_not_copied_was_deleted(url, state, unsent):
    """Then the run goes on with what the store has."""
    shutil.rmtree(unsent)
    unsent.mkdir()
    (unsent / ".unsent").write_text(mirror._token(open_store(url).read("owner/00000001.json")))
    with CheckpointManager(url) as manager:
        assert manager.directory == unsent and manager.restore(state).step == 1
        manager.save(3, state)
    kept = {name.partition("/")[0] for name in open_store(url).list()}
    assert {"step-0000000001", "step-0000000003"} <= kept


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_another_has_written_since(url, state, unsent, tmp_path, monkeypatch, warnings_of):
    """What was not copied is kept, and named."""
    with monkeypatch.context() as elsewhere:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        with CheckpointManager(url) as manager:
            assert manager.restore(state).step == 1
            manager.save(5, state)
    with CheckpointManager(url) as manager:
        assert manager.directory != unsent and manager.restore(state).step == 5
    assert (
        f"{unsent} has what was not copied to {url}, which was written since" in warnings_of()[-1]
    )
    with CheckpointManager(str(unsent), read_only=True) as disk:
        assert disk.latest().step == 2


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_logs_of_one_that_ends_while_another_starts(url, monkeypatch):
    """They are those of this run, too; what this process has written stays."""
    monkeypatch.setattr(mirror, "_has_left", lambda data: b'"left": true' in data)
    first = Mirror(url)
    (first.directory / "metrics.jsonl").write_text("1\n")
    (first.directory / "worker-0.log").write_text("old")
    first.own()
    first.flush()
    with Mirror(url) as second:
        (second.directory / "worker-0.log").write_text("new")
        (first.directory / "metrics.jsonl").write_text("1\n2\n")
        first.close()
        second.own()
        assert (second.directory / "metrics.jsonl").read_text() == "1\n2\n"
    store = open_store(url)
    assert store.read("metrics.jsonl") == b"1\n2\n" and store.read("worker-0.log") == b"new"


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_an_interrupt_is_not_followed_by_another_wait(url, state, monkeypatch):
    """As by the second Ctrl-C: `close` of manager and mirror would wait for the store again."""
    manager, hangs = CheckpointManager(url), threading.Event()
    run = manager._mirror
    copied = run._copy
    monkeypatch.setattr(run, "_copy", lambda: (hangs.wait(), copied()))
    wait_for = run._changed.wait_for

    def interrupted(predicate, timeout=None):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait_for(predicate, timeout)

    monkeypatch.setattr(run._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt), manager:
        manager.save(1, state, wait=True)
    assert run._ends.is_set() and (run.directory / ".unsent").exists()
    hangs.set()
    run._thread.join()
    run._lock.release()


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_says_that_it_waits_for_the_store(url, state, monkeypatch, warnings_of):
    monkeypatch.setattr(mirror, "_SAID_AFTER", 0.05)
    with CheckpointManager(url) as manager:
        copy = manager._mirror._copy
        monkeypatch.setattr(manager._mirror, "_copy", lambda: (time.sleep(0.2), copy()))
        manager.save(1, state, wait=True)
        (line,) = warnings_of()
        assert f"waits until {url} has all; while it fails, up to 10:00 (--keep_trying)" in line
        assert f"{manager.directory} has all: if this process is killed before" in line


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_saving_does_not_wait_for_the_store(url, state, monkeypatch):
    gate = threading.Event()
    with CheckpointManager(url, keep=1) as manager:
        filesystem = manager._mirror._store._fs
        write = filesystem.pipe_file
        monkeypatch.setattr(filesystem, "pipe_file", lambda *a, **k: (gate.wait(), write(*a, **k)))
        for step in range(1, 6):  # retention deletes what is being copied
            manager.save(step, state)
            manager.wait()
        gate.set()
    names = open_store(url).list()
    assert {n.split("/")[0] for n in names if n.startswith("step-")} == {"step-0000000005"}


def test_faults_of_a_store():
    from tests.chaos import stores as chaos

    said, failures = chaos.run(faults=30, cases=None, seed=5)
    assert not failures, said
