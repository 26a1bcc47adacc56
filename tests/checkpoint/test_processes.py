"""Several processes, full disks, and kills at any moment."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf
from saved import restore_fresh, save_steps, state_of, steps_in, values_of

from ctl.base import durable
from ctl.checkpoint import CheckpointManager
from ctl.errors import CheckpointError, UsageError


def test_wait_for_new(tmp_path):
    reader = CheckpointManager(tmp_path / "run", read_only=True)
    assert reader.wait_for_new(-1, 0.05, poll_seconds=0.01) is None
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(10, state_of(10), wait=True)
        assert reader.wait_for_new(9, 0).step == 10
        assert reader.wait_for_new(10, 0) is None
        timer = threading.Timer(0.1, manager.save, (20, state_of(20)))
        timer.start()
        assert reader.wait_for_new(10, 60, poll_seconds=0.01).step == 20
        timer.join()
        manager.restore(state_of(0), 10)
        manager.save(15, state_of(15), wait=True)
        assert reader.wait_for_new(20, 0).step == 15  # the run went back


def test_one_writer(tmp_path):
    code = "import sys, time; from ctl.base.durable import Lock; "
    code += "lock = Lock(sys.argv[1]); print(1, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(600)", str(tmp_path / ".lock")],
        stdout=subprocess.PIPE,
    ) as holder:
        try:
            assert holder.stdout.readline() == b"1\n"
            with pytest.raises(CheckpointError, match=f"written by process {holder.pid} on "):
                CheckpointManager(tmp_path)
            assert CheckpointManager(tmp_path, read_only=True).restore(state_of(0)) is None
        finally:
            holder.kill()
    CheckpointManager(tmp_path).close()


def test_the_later_workers_of_a_job_wait_until_they_are_asked_to_save(tmp_path, monkeypatch):
    """All workers open one directory, and their loops have only the chief save."""
    cluster = {"worker": ["localhost:1", "localhost:2"]}

    def config(index):
        task = {"type": "worker", "index": index}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))

    config(1)
    with CheckpointManager(tmp_path / "run") as later:
        assert later.restore(state_of(0)) is None and not (tmp_path / "run").exists()
        config(0)
        with CheckpointManager(tmp_path / "run") as chief:
            chief.save(1, state_of(1), wait=True)
            config(1)
            with CheckpointManager(tmp_path / "run") as again:  # also among checkpoints
                assert again.restore(state_of(0)).step == 1
                with pytest.raises(CheckpointError, match="is being written by process"):
                    again.save(2, state_of(2))
        with pytest.raises(UsageError, match="holds a run up to step 1"):
            later.save(3, state_of(3))
    task = {"type": "worker", "index": 0}  # after a chief, it is not the first
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    CheckpointManager(tmp_path / "second").close()
    assert not (tmp_path / "second").exists()
    with CheckpointManager(tmp_path / "own") as own:
        own.save(3, state_of(3), wait=True)
        assert own.latest().step == 3
    with pytest.raises(CheckpointError, match="closed or read-only"):
        own.save(4, state_of(4))


def test_a_writer_waits_for_another_to_end(tmp_path):
    other = durable.Lock(tmp_path / ".lock")
    with pytest.raises(durable.Locked, match="is being written by process"):
        CheckpointManager(tmp_path, lock_timeout=0.3)
    began = time.monotonic()
    threading.Timer(0.5, other.release).start()
    with CheckpointManager(tmp_path, lock_timeout=60.0) as manager:
        assert time.monotonic() - began >= 0.5
        manager.save(1, state_of(1), wait=True)


# Writes to two directories: on a tmpfs, if there is one, and then under a limit of the process.
FULL_DISKS = """
import os, sys, resource
import tensorflow as tf
from ctl.checkpoint import CheckpointManager
from ctl.errors import CheckpointError, UsageError

def fill(directory):
    small, big = tf.Variable(tf.fill([1000], 7.0)), tf.Variable(tf.zeros([1 << 20]))
    with CheckpointManager(directory) as manager:
        manager.save(1, {"model": [small]}, wait=True)
        for asynchronous in (False, True):
            try:
                manager.save(2, {"model": [small, big]}, wait=not asynchronous)
                manager.wait()
            except CheckpointError as error:
                print(error)
        assert sorted(os.listdir(directory)) == [".lock", "latest.json", "step-0000000001"]
        small.assign(tf.zeros([1000]))
        assert manager.restore({"model": [small]}).step == 1
        assert (small.numpy() == 7).all()
        manager.save(3, {"model": [small]}, wait=True)
        assert [s.step for s in manager.all()] == [1, 3]

tmpfs, inodes, limited = sys.argv[1:]
if os.path.ismount(tmpfs):
    fill(tmpfs)
    try:
        CheckpointManager(inodes + "/run/checkpoints")
    except CheckpointError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
fill(limited)
"""


@pytest.fixture(scope="module")
def full_disks(tmp_path_factory):
    """What a child says of a full tmpfs and of a limit on file sizes: directories and lines."""
    paths = {means: tmp_path_factory.mktemp(means) for means in ("tmpfs", "inodes", "limit")}
    # In a mount namespace of the child: gone with it.
    mount = f"mount -t tmpfs -o size=2m tmpfs {paths['tmpfs']}"
    mount += f" && mount -t tmpfs -o nr_inodes=1 tmpfs {paths['inodes']}"
    wrap = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    try:
        subprocess.run([*wrap, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        wrap = []
    command = [*wrap, sys.executable, "-c", FULL_DISKS, *map(str, paths.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if not wrap:
        del paths["tmpfs"], paths["inodes"]
    return {
        means: (path, [line for line in lines if str(path) in line])
        for means, path in paths.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("means", ["tmpfs", "limit"])
def test_full_disk(full_disks, means):
    if means not in full_disks:
        pytest.skip("may not mount a tmpfs")
    path, lines = full_disks[means]
    assert len(lines) == 2
    for line in lines:
        head, _, tail = line.partition(f": {path}; ")
        assert head == "No space left to save the checkpoint of step 2 (4.0 MiB)"
        missing = float(tail.removeprefix("free ").split(" MiB or choose another directory")[0])
        assert 0 < missing <= 4


@pytest.mark.slow
def test_no_inode_for_the_directory(full_disks):
    if "inodes" not in full_disks:
        pytest.skip("may not mount a tmpfs")
    path, lines = full_disks["inodes"]
    assert lines == [
        f"No inode left to open the checkpoints for writing: {path}/run/checkpoints; delete some "
        "files, or choose another directory"
    ]


def test_a_directory_that_cannot_be_written(tmp_path):
    directory = tmp_path / "run"
    save_steps(directory, [1])
    with CheckpointManager(directory) as manager:
        manager.restore(state_of(0))
        directory.chmod(0o500)
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)  # Root may write anywhere.
            with pytest.raises(CheckpointError, match="Cannot .*: Permission denied; make it"):
                manager.save(2, state_of(2), wait=True)
            with pytest.raises(CheckpointError, match="Cannot open .*: Permission denied; make it"):
                CheckpointManager(directory / "new")
        finally:
            os.seteuid(os.getuid())
            directory.chmod(0o700)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Cannot open .*file/run: Not a directory"):
        CheckpointManager(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="Cannot look .*file: Not a directory"):
        restore_fresh(tmp_path / "file")


def test_scratch_that_cannot_be_deleted_ends_nothing(tmp_path, monkeypatch):
    """As on an NFS, where a file that somebody has open stays as ``.nfs…``."""

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(durable.shutil, "rmtree", busy)
        save_steps(tmp_path, [1, 2, 3], keep=1)
        assert steps_in(tmp_path) == [3]
        left = [path for path in tmp_path.iterdir() if path.name.startswith("tmp-")]
        assert len(left) == 2
        save_steps(tmp_path, [4], keep=1)  # the sweep at its start fails, too
    save_steps(tmp_path, [5], keep=1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp-")]


def test_a_directory_is_replaced_after_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    events = []
    for name in ("rename", "fsync"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, o=original, n=name: (events.append(n), o(*args))[1]
        )
    delete = durable._delete
    monkeypatch.setattr(durable, "_delete", lambda path: (events.append("delete"), delete(path)))
    final, new = tmp_path / "export", tmp_path / "tmp-export-1-00000000"
    (final / "old").mkdir(parents=True)
    (new / "deep").mkdir(parents=True)
    (new / "deep" / "file").write_text("new")
    durable.flush(new)
    assert events == ["fsync"] * 3  # the file and two directories
    durable.publish(new, final)
    assert events[3:] == ["rename", "rename", "fsync", "delete"]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]
    assert (final / "deep" / "file").read_text() == "new"


def test_what_cannot_be_replaced_stays(tmp_path, monkeypatch):
    final, new = tmp_path / "export", tmp_path / "tmp-export-1-00000000"
    final.mkdir()
    (final / "old").touch()
    with pytest.raises(FileNotFoundError):
        durable.publish(new, final)  # there is none
    assert (final / "old").exists()


@pytest.mark.parametrize("name", ["a[1]", "b[", "c*", "d?", "e\\f"])
def test_a_directory_whose_name_is_a_pattern(tmp_path, name):
    (tmp_path / "a1").mkdir()  # what a pattern could find
    save_steps(tmp_path / name, [1, 2])
    saved, values = restore_fresh(tmp_path / name)
    assert saved.step == 2 and set(values) == {2.0}
    assert restore_fresh(tmp_path / name, 1)[0].step == 1


# Saves in a loop.
SAVES = """
import itertools, sys
import tensorflow as tf
from ctl.checkpoint import CheckpointManager

def run():
    counter = tf.Variable(0, dtype=tf.int64)
    state = {"model": [tf.Variable(tf.zeros([20000])) for _ in range(6)], "global_step": [counter]}

    @tf.function
    def advance():
        for v in state["model"]:
            v.assign_add(tf.ones_like(v))
        counter.assign_add(1)

    with CheckpointManager(sys.argv[1], keep=2) as manager:
        manager.restore(state)
        for rounds in itertools.count():
            advance()
            manager.save(int(counter), state, wait=rounds == 0)
            print("saved", flush=True)
"""


def test_kill_at_any_moment(zygote, tmp_path):
    (tmp_path / "saves.py").write_text(SAVES)
    run = tmp_path / "run"
    state = {
        "model": [tf.Variable(tf.zeros([20000])) for _ in range(6)],
        "global_step": [tf.Variable(0, dtype=tf.int64)],
    }
    last = -1
    for _ in range(7):
        command = zygote.start("saves", run, path=[tmp_path])
        command.until("saved", "stdout")
        time.sleep(random.uniform(0, 0.3))
        command.signal(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        reader = CheckpointManager(run, read_only=True)
        saved = reader.restore(state)
        assert set(values_of(state)) == {saved.step}
        assert saved.step == reader.latest().step > last  # No progress is lost.
        last = saved.step
        for each in reader.all():
            durable.verify(each.path, each.files)
    CheckpointManager(run).close()  # The lock is free; what was unfinished is gone.
    assert not [name for name in os.listdir(run) if name.startswith("tmp-")]


# The order in which things reach the disk.


def test_everything_is_durable_before_it_is_seen(tmp_path, monkeypatch):
    events = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real["fsync"](descriptor)

    def moving(name):
        def move(source, target):
            events.append(("move", Path(source), Path(target)))
            real[name](source, target)

        return move

    save_steps(tmp_path, [1], keep=1)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", moving("rename"))
    monkeypatch.setattr(os, "replace", moving("replace"))
    save_steps(tmp_path, [2], keep=1)
    new, old, pointer = (
        tmp_path / name for name in ("step-0000000002", "step-0000000001", "latest.json")
    )

    def index(wanted):
        (found,) = (i for i, event in enumerate(events) if event[0] == "move" and wanted(event))
        return found

    published = index(lambda e: e[2] == new)
    pointed = index(lambda e: e[2] == pointer)
    deleted = index(lambda e: e[1] == old)
    unfinished = events[published][1]
    described = index(lambda e: e[2] == unfinished / "manifest.json")
    files = {unfinished / name for name in os.listdir(new) if name != "manifest.json"}
    assert len(files) == 2
    assert files <= {event[1] for event in events[:described]}
    assert ("fsync", events[described][1]) in events[:described]
    assert ("fsync", unfinished) in events[described:published]
    assert ("fsync", tmp_path) in events[published:pointed]
    assert ("fsync", events[pointed][1]) in events[published:pointed]
    assert ("fsync", tmp_path) in events[pointed:deleted]
