"""ctl.base.block_cache: a cache that processes share, of bounded size."""

from __future__ import annotations

import os
import signal
import time

import cache_worker
import pytest
from paths import SUPPORT

from ctl.base.block_cache import BlockCache, parsed
from ctl.errors import UsageError

MIB = 1 << 20


def filled(cache: BlockCache, count: int) -> list[tuple[str, bytes]]:
    blocks = [cache_worker.content(number, cache.block) for number in range(count)]
    for name, data in blocks:
        cache.put(name, data)
    return blocks


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("/tmp/a:20GiB", ("/tmp/a", 20 << 30)), ("c:1.5MiB", ("c", 3 << 19))],
)
def test_sizes(text, wanted):
    assert parsed(text) == wanted


@pytest.mark.parametrize("text", ["/tmp/a", "/tmp/a:20", ":1GiB", "/tmp/a:20GB", "/tmp/a:10KiB"])
def test_other_texts_are_refused(text):
    with pytest.raises(UsageError, match="/tmp/cache:20GiB|1MiB or more"):
        parsed(text)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made: Not a directory"):
        BlockCache(tmp_path / "file" / "cache", MIB)


def test_what_was_used_longest_ago_goes_first(tmp_path):
    cache = BlockCache(tmp_path, MIB)
    (tmp_path / "mine.txt").write_text("not of the cache")
    blocks = filled(cache, 40)
    for age, (name, _) in enumerate(reversed(blocks)):  # block 0 was used last
        if (tmp_path / name).exists():
            os.utime(tmp_path / name, (time.time() - 100 - age,) * 2)
    blocks += filled(cache, 200)[40:]
    there = [cache.get(name, 5, 100) == data[5:105] for name, data in blocks]
    assert cache_worker.in_use(cache) <= MIB
    assert all(there[-30:]) and not any(there[:40])
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("damage", ["cut", "zeros", "longer"])
def test_a_torn_block_is_not_taken(tmp_path, damage):
    """As a power cut may leave it."""
    ((name, data),) = filled(BlockCache(tmp_path, MIB), 1)
    whole = (tmp_path / name).read_bytes()
    torn = {"cut": whole[:-100], "zeros": bytes(len(whole)), "longer": whole + b"0"}[damage]
    (tmp_path / name).write_bytes(torn)
    cache = BlockCache(tmp_path, MIB)
    assert cache.get(name, 0, 10) is None
    cache.put(name, data)
    assert cache.get(name, 0, len(data)) == data


def test_the_count_of_bytes_is_found_again(tmp_path):
    cache = BlockCache(tmp_path, MIB)
    filled(cache, 30)
    (tmp_path / "lock").write_text("nonsense")
    filled(cache, 200)
    assert cache_worker.in_use(cache) <= MIB
    assert int((tmp_path / "lock").read_text()) == cache_worker.in_use(cache)


def test_of_larger_data_the_same_part_is_kept(tmp_path):
    cache = BlockCache(tmp_path, MIB)
    cache.announce("data", 4 * MIB, 1)
    names = [cache_worker.content(number, 8)[0] for number in range(1000)]
    kept = [name for name in names if cache.keeps(name)]
    assert 150 < len(kept) < 300  # 0.9 of a quarter
    cache.announce("data", MIB, 1)  # part of them, seen again
    assert kept == [name for name in names if cache.keeps(name)]
    cache.announce("other data", 4 * MIB, 1)
    fewer = {name for name in names if cache.keeps(name)}
    assert fewer < {*kept} and len(fewer) > 0.3 * len(kept)


def test_whole_files_stay_until_the_process_ends(tmp_path):
    cache = BlockCache(tmp_path, MIB)
    filled(cache, 200)

    def fill(descriptor: int) -> None:
        os.write(descriptor, b"x" * (MIB // 2))

    path = cache.whole("f" * 32, MIB // 2, fill)
    filled(cache, 200)
    assert path.read_bytes() == b"x" * (MIB // 2)
    assert cache.whole("f" * 32, MIB // 2, lambda _: pytest.fail("it is there")) == path
    with pytest.raises(UsageError, match="has no room for files of this format"):
        cache.whole("e" * 32, MIB // 2 + 1, fill)
    assert cache_worker.in_use(cache) <= MIB


def test_a_disk_that_is_full_costs_the_next_read(tmp_path, monkeypatch, warnings_of):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    cache = BlockCache(tmp_path, MIB)
    blocks = filled(cache, 3)
    assert [cache.get(name, 0, 1) for name, _ in blocks] == [None] * 3
    (warning,) = warnings_of()
    assert "No space left on device" in warning
    assert [entry.name for entry in tmp_path.iterdir()] == ["lock"]


def test_a_file_that_goes_while_room_is_made(tmp_path, monkeypatch, warnings_of):
    """Who could not fill one deletes it, and holds no lock meanwhile."""
    cache = BlockCache(tmp_path, MIB)
    (name, data), *_ = filled(cache, 60)
    scandir = os.scandir

    def go_after(folder):
        entries = list(scandir(folder))
        (tmp_path / "tmp-0123456789abcdef").unlink(missing_ok=True)
        return entries

    (tmp_path / "tmp-0123456789abcdef").touch()
    (tmp_path / "lock").write_bytes(b"")  # the room is counted anew
    monkeypatch.setattr(os, "scandir", go_after)
    cache.put("f" * 32, data)
    assert cache.get("f" * 32, 0, 9) == data[:9] and not warnings_of()


def test_processes_share_it_and_are_killed(zygote_without_tensorflow, tmp_path):
    """No wrong block, and never more bytes than the limit: each process looks after each block."""
    start, text = zygote_without_tensorflow.start, f"{tmp_path}:1MiB"
    workers = [
        start("cache_worker", text, seed, count, path=[SUPPORT])
        for seed, count in ((0, 600), (1, 600), (2, 10**6), (3, 10**6))
    ]
    for number, killed in enumerate(workers[2:]):
        killed.until("ready", "stdout")
        time.sleep(0.1 * (number + 1))
        killed.signal(signal.SIGKILL)
        killed.wait()
    for worker in workers[:2]:
        assert worker.wait() == 0, worker.stderr
    cache = BlockCache(tmp_path, MIB)
    (tmp_path / "tmp-0123456789abcdef").write_bytes(b"of a dead process")
    blocks = filled(cache, cache_worker.BLOCKS)
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("tmp-")]
    for name, data in blocks:
        assert cache.get(name, 0, len(data)) in (None, data)
    assert 0.8 * MIB < cache_worker.in_use(cache) <= MIB
