"""Damaged checkpoints are passed over, and what else lies in the directory is left alone."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf
from helpers import make_loop
from saved import edit_manifest, restore_fresh, save_steps, state_of, steps_in, values_of

from ctl.base import durable
from ctl.checkpoint import CheckpointManager, Reader, bundle
from ctl.errors import CheckpointError, UsageError


@pytest.fixture(autouse=True)
def nothing_waits_for_the_disk(monkeypatch):
    """That takes most of the time; `test_processes.py` tests it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


DATA = "variables.data-00000-of-00001"
Damage = Callable[[Path], None]


def lose(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def write(name: str, text: str) -> Damage:
    return lambda path: (path / name).write_text(text)


def truncate(path: Path) -> None:
    os.truncate(path / DATA, 10)


def flip(path: Path) -> None:
    content = bytearray((path / DATA).read_bytes())
    content[len(content) // 2] ^= 1
    (path / DATA).write_bytes(content)


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-20])


def link_data(path: Path) -> None:
    (path / DATA).rename(path.parent / "elsewhere")
    (path / DATA).symlink_to(path.parent / "elsewhere")


def fifo(name: str) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return damage


def first_version(path: Path) -> None:
    """The manifest of the first version, with another kind of checksum."""
    files = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in ((p.name, p.read_bytes()) for p in path.glob("variables.*"))
    }
    edit_manifest(files=files)(path)


def flipped_first_version(path: Path) -> None:
    first_version(path)
    flip(path)


def other_content(path: Path) -> None:
    # Checksums hold, but TensorFlow finds something else in the files.
    tensors = {"model": [tf.zeros([1])]}
    bundle.write(str(path / "variables"), tensors)
    edit_manifest(files={k: v for k, v in durable.seal(path).items() if k.startswith("var")})(path)


EMPTY = {"size": 0, "sha256": ""}
DAMAGES = {
    "truncated": (truncate, "has 10 bytes instead of"),
    "flipped": (flip, f"the crc32 of {DATA}"),
    "no_index": (lose("variables.index"), "variables.index cannot be read"),
    "no_manifest": (lose("manifest.json"), "manifest.json cannot be read"),
    "cut_manifest": (cut_manifest, "manifest.json is not JSON"),
    "escape": (
        edit_manifest(files={"variables.index": EMPTY, "../../secret": EMPTY}),
        "not a file of a checkpoint: '../../secret'",
    ),
    "link": (link_data, f"{DATA} cannot be read"),
    "fifo": (fifo("manifest.json"), "not a regular file"),
    "data_fifo": (fifo(DATA), f"{DATA} cannot be read (not a regular"),
    "flipped_first": (flipped_first_version, f"the sha256 of {DATA}"),
    "no_sum": (edit_manifest(files={"variables.index": {"size": 3}}), "no size and checksum of"),
    "schema": (edit_manifest(schema=2), "schema 2 is not 1"),
    "step": (edit_manifest(step=20), "of step 20"),
    "no_files": (edit_manifest(files={}), "no variables.index"),
    "types": (edit_manifest(metrics={"accuracy": "high"}), "a metric is no number"),
    "evaluated": (edit_manifest(evaluated=["loss"]), "it names no metrics that were evaluated"),
    "code": (edit_manifest(code={"step": 3}), "its code has no step and source"),
    "modules": (
        edit_manifest(code={"step": "", "source": "", "modules": 3}),
        "the modules of its code are no object",
    ),
    "model": (
        edit_manifest(code={"step": "", "source": "", "model": {"layer dense": 3}}),
        "the model of its code has no settings",
    ),
    "list": (write("manifest.json", "[]"), "not an object"),
    "bomb": (write("manifest.json", "[" * 100000), "is not JSON"),
    "other_content": (other_content, "is not what the manifest says"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, warnings_of, kind):
    damage, message = DAMAGES[kind]
    save_steps(tmp_path, [10, 20, 30])
    damage(tmp_path / "step-0000000030")
    saved, values = restore_fresh(tmp_path)
    assert (saved.step, values) == (20, [20, 20, 20])
    (warning,) = warnings_of()
    assert "step-0000000030" in warning
    assert message in warning
    with pytest.raises(CheckpointError, match="No intact checkpoint in .*step 30: "):
        restore_fresh(tmp_path, 30)
    # The run goes on and meets the same step again.
    with CheckpointManager(tmp_path) as manager:
        manager.restore(state_of(0))
        manager.save(30, state_of(31))
    assert restore_fresh(tmp_path)[1] == [31, 31, 31]


def test_a_checkpoint_of_the_first_version(tmp_path, warnings_of):
    save_steps(tmp_path, [10, 20])
    first_version(tmp_path / "step-0000000020")
    saved, values = restore_fresh(tmp_path)
    assert (saved.step, values) == (20, [20, 20, 20]) and not warnings_of()


def test_a_manifest_with_a_group_that_the_data_lack(tmp_path):
    loop = make_loop(directory=tmp_path)
    loop.train(1)
    loop.save(wait=True)
    loop.checkpoints.close()
    [saved] = loop.checkpoints.all()
    trained = [{"name": "v", "shape": [4], "dtype": "int32"}]
    edit_manifest(variables={**saved.variables, "trained": trained})(saved.path)
    loop = make_loop(directory=tmp_path)
    with pytest.raises(CheckpointError, match="0001 is damaged: trained/0/.* restore it from a"):
        loop.restore()
    loop.checkpoints.close()


def test_no_intact_checkpoint_left(tmp_path):
    save_steps(tmp_path, [10, 20])
    flip(tmp_path / "step-0000000020")
    lose("manifest.json")(tmp_path / "step-0000000010")
    state = state_of(5)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match="No intact checkpoint in .*step 20: the crc32"),
    ):
        manager.restore(state)
    assert values_of(state) == [5, 5, 5]


@pytest.mark.parametrize("pointer", [None, "", "{", "[]", '{"step": "3"}', '{"step": 99}'])
def test_without_a_valid_pointer_the_directory_is_scanned(tmp_path, pointer):
    save_steps(tmp_path, [10, 20])
    change = lose("latest.json") if pointer is None else write("latest.json", pointer)
    change(tmp_path)
    assert CheckpointManager(tmp_path, read_only=True).latest().step == 20
    assert restore_fresh(tmp_path)[0].step == 20


def of_step(step: int, damage: Damage) -> Damage:
    return lambda directory: damage(directory / f"step-{step:010d}")


def both(directory: Path) -> None:
    for step in (10, 15):
        flip(directory / f"step-{step:010d}")


@pytest.mark.parametrize(
    ("change", "last", "valid", "best"),
    [
        (lambda directory: None, 15, 15, 10),
        (of_step(15, flip), 10, 15, 10),
        (of_step(15, cut_manifest), 10, 10, 10),
        (of_step(15, shutil.rmtree), 10, 10, 10),
        (of_step(10, flip), 15, 15, 15),
        (both, 40, 15, 40),
        (lose("latest.json"), 40, 40, 40),
        (write("latest.json", "{"), 40, 40, 40),
    ],
)
def test_all_readers_take_the_same_checkpoint(tmp_path, warnings_of, change, last, valid, best):
    """The run went back to step 10, so 20 and 40 are not of its history."""
    with CheckpointManager(tmp_path) as manager:
        for step in (10, 20, 40):
            manager.save(step, state_of(step), {"accuracy": step / 100})
        manager.restore(state_of(0), 10)
        manager.annotate(10, {"accuracy": 0.3})
        manager.save(15, state_of(15), {"accuracy": 0.2})
    change(tmp_path)
    assert restore_fresh(tmp_path)[0].step == last
    said = warnings_of()
    assert Reader(tmp_path).saved.step == last
    passed_over = [warning for warning in said if "Skipping" in warning]
    assert warnings_of() == [*said, *passed_over]
    assert CheckpointManager(tmp_path, read_only=True).latest().step == valid  # reads manifests
    assert restore_fresh(tmp_path, "best")[0].step == best


def test_no_checkpoint(tmp_path):
    reader = CheckpointManager(tmp_path / "never", read_only=True)
    assert [reader.restore(state_of(0), s) for s in (None, "latest", "best")] == [None] * 3
    assert (reader.all(), reader.latest(), reader.best()) == ([], None, None)
    assert not (tmp_path / "never").exists()
    save_steps(tmp_path, [10, 20])
    with pytest.raises(CheckpointError, match="No checkpoint of step 15 in .*choose one of 10, 20"):
        restore_fresh(tmp_path, 15)
    with pytest.raises(CheckpointError, match="has the metric 'accuracy'"):
        restore_fresh(tmp_path, "best")


def test_saving_a_step_again(tmp_path):
    save_steps(tmp_path, [10, 20])
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(UsageError, match="holds a run up to step 20: call restore"):
            manager.save(30, state_of(99), wait=True)
        manager.restore(state_of(0))
        path = manager.save(20, state_of(99), wait=True)
        assert restore_fresh(tmp_path)[1] == [20, 20, 20]
        truncate(path)
        assert manager.save(20, state_of(99), wait=True) == path
    assert restore_fresh(tmp_path)[1] == [99, 99, 99]


def test_going_back_to_an_earlier_step(tmp_path, warnings_of):
    save_steps(tmp_path, [10, 20, 30, 40])
    with CheckpointManager(tmp_path) as manager:
        manager.restore(state_of(0), 10)
        assert "20, 30, 40" in warnings_of()[0]
        manager.save(20, state_of(21), wait=True)  # Intact, but not of this run's past.
        assert restore_fresh(tmp_path)[1] == [21, 21, 21]
        assert steps_in(tmp_path) == [10, 20, 30, 40]
        manager.save(35, state_of(35), wait=True)
        assert steps_in(tmp_path) == [10, 20, 35, 40]
    assert restore_fresh(tmp_path)[1] == [35, 35, 35]


# What else lies in the directory.


def test_strange_things_are_left_alone(tmp_path):
    directory, outside = tmp_path / "run", tmp_path / "outside"
    save_steps(outside, [50])
    save_steps(directory, [10])
    (directory / "step-0000000050").symlink_to(outside / "step-0000000050")
    (directory / "step-0000000060").write_text("a file")
    (directory / "step-70").mkdir()
    (directory / "tmp-mine").mkdir()
    (directory / f"tmp-step-{'0' * 10}-1-00000000").symlink_to(outside)
    stale = directory / "tmp-step-0000000080-4711-0123abcd"
    stale.mkdir()
    (stale / "variables.index").touch()
    before = sorted(os.listdir(directory))
    assert restore_fresh(directory)[0].step == 10
    assert sorted(os.listdir(directory)) == before
    with CheckpointManager(directory, keep=1) as manager:
        assert manager.latest().step == 10
        assert not stale.exists()
        manager.restore(state_of(0))
        manager.save(11, state_of(11))
    assert steps_in(directory) == [11]
    assert steps_in(outside) == [50]
    assert (directory / "tmp-mine").is_dir()


def test_a_reader_touches_nothing(tmp_path):
    save_steps(tmp_path, [10, 20])
    (tmp_path / "tmp-latest.json-1-00000000").touch()
    flip(tmp_path / "step-0000000020")
    (tmp_path / ".lock").unlink()

    def look():
        return {
            str(p): (p.stat().st_mtime_ns, p.stat().st_ino)
            for p in [tmp_path, *tmp_path.rglob("*")]
        }

    before = look()
    with CheckpointManager(tmp_path, read_only=True) as reader:
        assert reader.restore(state_of(0)).step == 10
        reader.wait_for_new(99, 0)
    assert look() == before
