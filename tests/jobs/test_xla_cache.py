"""Programs of earlier runs: the same bits, and a damaged or foreign one is never executed."""

from __future__ import annotations

import os

import pytest

from ctl.base import cache
from ctl.jobs import xla_cache

PROGRAM = """
import hashlib
from ctl.jobs import xla_cache
opened = xla_cache.open_cache()
import tensorflow as tf

def digest(n):
    x = tf.random.stateless_normal([n, n], [1, 2])
    for power in range(3):
        x = tf.tanh(x @ x / n) + tf.math.exp(-x) / (power + 1)
    return x

def run():
    for n in (32, 48):
        value = tf.function(digest, jit_compile=True)(n).numpy()
        print(hashlib.sha256(value.tobytes()).hexdigest())
"""


def test_a_loaded_program_gives_the_same_bits_and_a_damaged_one_is_compiled(zygote, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def run():
        home = str(tmp_path)
        return zygote.run("program", path=[tmp_path], XDG_CACHE_HOME=home).stdout.split()

    compiled = run()
    (shared,) = (tmp_path / "ctl").iterdir()
    intact, damaged = sorted(shared.iterdir())  # and no directory of the process
    before = intact.stat().st_ino, damaged.stat().st_ino
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert run() == compiled
    assert sorted(shared.iterdir()) == [intact, damaged]
    assert intact.stat().st_ino == before[0]  # was loaded: what is compiled is published anew
    assert damaged.stat().st_ino != before[1] and damaged.read_bytes() != content


def test_precompile_has_the_programs_of_the_run(zygote, tmp_path):
    flags = [f"--model_dir={tmp_path / 'run'}", "--model=dense", "--train_steps=40", "--noexport"]

    def train(*more):
        zygote.run("ctl.train", *flags, *more, XDG_CACHE_HOME=str(tmp_path))
        assert (tmp_path / "run").exists() == (not more)
        return {path: path.stat().st_ino for path in (tmp_path / "ctl").glob("*/*.pb")}

    compiled = train("--precompile")
    assert compiled and train() == compiled


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Has three entries of 1000 bytes, "0" the oldest."""
    path = tmp_path / "shared"
    first = xla_cache.XlaCache(path)
    for number in range(3):
        (first.path / f"{number}.pb").write_bytes(b"%d" % number * 1000)
    first.close()
    for number in range(3):
        os.utime(path / f"{number}.pb", (1e9 + number, 1e9 + number))
    assert sorted(p.name for p in path.iterdir()) == ["0.pb", "1.pb", "2.pb"]
    return path


def entries(opened):
    found = {path.name: path.read_bytes()[:1] for path in opened.path.iterdir()}
    opened.close()
    return found


def test_only_what_is_intact_is_given_to_tensorflow(shared):
    whole = (shared / "0.pb").read_bytes()
    (shared / "0.pb").write_bytes(whole[:-1])
    (shared / "1.pb").write_bytes(b"")
    (shared / "3.pb").write_bytes(whole.partition(b"\n")[2])  # without a checksum
    assert entries(xla_cache.XlaCache(shared)) == {"2.pb": b"2"}
    assert [path.name for path in shared.iterdir()] == ["2.pb"]


def test_processes_at_once_and_killed_ones_do_no_harm(shared):
    one, other = xla_cache.XlaCache(shared), xla_cache.XlaCache(shared)
    for opened in (one, other):
        (opened.path / "3.pb").write_bytes(b"3")
    one.publish()
    (other.path / "4.pb.tmp").write_bytes(b"unfinished")
    killed = shared / f"run-{2**22 + 1}-x"  # more than the largest number of a process
    killed.mkdir()
    other.close()
    assert set(entries(one)) == {f"{number}.pb" for number in range(4)}
    assert entries(xla_cache.XlaCache(shared))["3.pb"] == b"3"
    assert not killed.exists()


def test_it_is_bounded(shared, monkeypatch):
    monkeypatch.setattr(xla_cache, "_MOST_BYTES", 2500)
    assert set(entries(xla_cache.XlaCache(shared))) == {"1.pb", "2.pb"}
    assert not (shared / "0.pb").exists()


def test_a_directory_that_is_open_to_others_is_not_used(tmp_path, monkeypatch):
    """Nor one in a directory where others could put another in its place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cache.directory()
    assert found == tmp_path / "ctl" and found.stat().st_mode & 0o777 == 0o700
    found.chmod(0o770)
    assert cache.directory() is None
    found.chmod(0o700)
    tmp_path.chmod(0o777)
    assert cache.directory() is None
    tmp_path.chmod(0o1777)  # as /tmp is
    assert cache.directory() == found
    (tmp_path / "ctl").rename(tmp_path / "elsewhere")
    (tmp_path / "ctl").symlink_to(tmp_path / "elsewhere")
    assert cache.directory() is None
