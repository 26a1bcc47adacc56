"""Data in object stores: the batches are those of a disk, of each kind of files."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored_sources
import tensorflow as tf

pytest.importorskip("fsspec")
from counted_store import CountedStore, upload
from object_stores import s3_server

from ctl.base import remote, stores
from ctl.base.remote import StorePath
from ctl.data import Files, Streaming, load, text
from ctl.data.records import TFRecords
from ctl.errors import UsageError

KINDS = [kind for kind in stored_sources.SOURCES if kind not in ("items", "data_source")]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Files of each kind of source, on the disk."""
    path = tmp_path_factory.mktemp("disk")
    stored_sources.write(path)
    return path


@pytest.fixture(autouse=True)
def store(root, monkeypatch):
    """The same files in a store, whose clients wait only shortly before they try again."""
    CountedStore.reset()
    upload(root, "data")
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.001)
    yield CountedStore
    CountedStore.reset()


@pytest.fixture
def cache(tmp_path):
    return f"{tmp_path / 'cache'}:8MiB"


def source(at: Any, kind: str) -> Any:
    return stored_sources.opened(at, [kind])[kind]


def in_store(kind: str, cache: str | None = None) -> Any:
    return source(StorePath("counted://data", cache), kind)


def batches(stream: Streaming, start: int) -> list[Any]:
    return [*stream.batches(start).take(9).as_numpy_iterator()]


def rows(of: Any, numbers: np.ndarray = np.arange(50)) -> list[Any]:  # noqa: B008
    found = of[numbers] if isinstance(of, np.ndarray) else of.read(numbers)
    return [np.array(found, object) if isinstance(found, list) else found]


def check_equal(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_disk(root, store, cache, kind):
    """Also where a resume begins; it refuses other data, and these are the same. What was read
    once, by any process, is not asked for again."""
    stored, local = (
        Streaming(one, global_batch_size=8, seed=3)
        for one in (in_store(kind, cache), source(root, kind))
    )
    check_equal(batches(stored, 2), batches(local, 2))
    assert stored.fingerprint() == local.fingerprint()
    store.forget()
    check_equal(batches(stored, 11), batches(local, 11))
    assert not store.requests
    again = in_store(kind, cache)
    store.forget()
    check_equal(rows(again), rows(source(root, kind)))
    assert "cat_file" not in store.requests


@pytest.mark.parametrize("kind", ["tfrecord", "folder", "json", "click_lines", "tar"])
def test_without_a_cache_examples_are_read_by_ranges(root, store, kind):
    stored, some = in_store(kind), np.array([7, 8, 41, 0])
    stored.read(some)  # reads an index, too
    store.forget()
    check_equal(rows(stored, some), rows(source(root, kind), some))
    assert store.requests.count("cat_file") == (4 if kind in ("folder", "tar", "json") else 3)


def tables() -> dict[str, bytes]:
    """Files of tables, by their names."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(40, 2)), draw.integers(0, 2, 40)
    rows = [f"{a},{b},{label}" for (a, b), label in zip(x.tolist(), y.tolist(), strict=True)]
    csv = "\n".join(["a,b,label", *rows]).encode()
    lines = [
        json.dumps({"a": a, "label": n}) for a, n in zip(x[:, 0].tolist(), y.tolist(), strict=True)
    ]
    arrays = io.BytesIO()
    np.savez(arrays, x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    found = {
        "a.csv": csv,
        "a.csv.gz": gzip.compress(csv),
        "a.jsonl": "\n".join(lines).encode(),
        "a.npz": arrays.getvalue(),
        "parts/train.csv": csv,
        "parts/test.csv": csv,
    }
    try:
        import pyarrow
        from pyarrow import parquet

        columns = io.BytesIO()
        parquet.write_table(pyarrow.table({"a": x[:, 0], "label": y}), columns)
        found["a.parquet"] = columns.getvalue()
    except ImportError:
        pass
    return found


@pytest.mark.slow
def test_files_of_users_are_those_of_a_disk(root, tmp_path, cache):
    """``--dataset`` as a URL: tables, images, tar files, clicks, records; also text."""
    disk = tmp_path / "disk"
    shutil.copytree(root / "folder", disk / "folder")
    for name in ("0.tar", "a.txt"):
        shutil.copy(root / name, disk / name)
    (disk / "days").mkdir()
    for day in range(2):
        shutil.copy(root / "a.txt", disk / "days" / f"day_{day}")
    (disk / "click.txt.gz").write_bytes(gzip.compress((root / "a.txt").read_bytes()))
    with tf.io.TFRecordWriter(str(disk / "a.tfrecord"), "GZIP") as writer:
        for number in range(20):
            features = tf.train.Features()
            for name in ("x", "label"):
                features.feature[name].int64_list.value.append(number % 2)
            writer.write(tf.train.Example(features=features).SerializeToString())
    for name, content in tables().items():
        (disk / name).parent.mkdir(exist_ok=True)
        (disk / name).write_bytes(content)
    upload(disk, "files")
    paths = ["folder", "0.tar", "a.txt", "days", "click.txt.gz", "a.tfrecord", "parts"]
    for path in [*paths, *(name for name in tables() if "/" not in name)]:
        found = []
        for at in (StorePath(f"counted://files/{path}", cache), disk / path):
            files = Files(at)
            splits = files.splits()
            options = {"global_batch_size": 4, "seed": 1}
            train = files.load(splits.train, training=True, **options)
            test = files.load(splits.evaluation, training=False, **options)
            of = train.arrays, test.arrays
            found.append((of, files.table(), splits, train.fingerprint()))
        (of, *others), (wanted, *wanted_others) = found
        assert others == wanted_others, path
        check_equal(of, wanted)


def test_text_is_that_of_a_disk(tmp_path):
    for name in ("a.b", "a/b", "a-b/c", "train"):  # in the order of paths
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(f"text {name}\n" * 200)
    upload(tmp_path, "text")
    found = [
        text.files(path, 16, global_batch_size=4)[0].arrays for path in ("counted://text", tmp_path)
    ]
    check_equal(found[:1], found[1:])


def test_datasets_of_tfds_in_memory(root, cache):
    """Only their metadata are copied to the disk."""
    options: dict[str, Any] = {"split": "train", "global_batch_size": 8}
    for kind in ("tfrecord", "array_record"):
        place = StorePath(f"counted://data/{kind}", cache)
        found = load("ctl_tiny_color", data_dir=place, **options)
        wanted = load("ctl_tiny_color", data_dir=root / kind, **options)
        check_equal([found.arrays], [wanted.arrays])
        assert found.fingerprint() == wanted.fingerprint()


def test_a_cache_that_is_smaller_than_the_data(store, tmp_path):
    """Holds its bound and a part of the data: an epoch asks for the rest."""
    cache = f"{tmp_path / 'cache'}:1MiB"
    files = StorePath("counted://large", cache)
    draw = np.random.default_rng(0)
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for _ in range(400):
            writer.write(draw.bytes(10_000))
    CountedStore().pipe_file("/large/a.tfrecord", (tmp_path / "a.tfrecord").read_bytes())
    stored, local = TFRecords(files / "a.tfrecord"), TFRecords(tmp_path / "a.tfrecord")
    per_epoch = []
    for _ in range(3):
        store.requests.clear()
        for rows in np.random.default_rng(1).permutation(400).reshape(20, 20):
            assert stored.read(rows) == local.read(rows)
            used = sum(entry.stat().st_size for entry in Path(tmp_path / "cache").iterdir())
            assert used <= 1 << 20
        per_epoch.append(store.requests.count("cat_file"))
    assert all(0.6 * 400 < count < 0.95 * 400 for count in per_epoch[1:])  # has about a quarter


def test_requests_overlap(root, store):
    store.delay = 0.002
    stored = in_store("folder")
    store.most = 0
    stored.read(np.arange(50))
    assert store.most > 10


def test_faults_that_pass_are_tried_again(root, store, cache):
    """503, resets and time-outs, at random."""
    draw = random.Random(0)

    class Unavailable(Exception):
        __module__ = "aiohttp"
        status = 503

    faults = (Unavailable("slow down"), ConnectionResetError(104, "reset"), TimeoutError("late"))

    def fault(_: int) -> None:
        if draw.random() < 0.2:
            raise draw.choice(faults)

    store.fault, state = fault, random.getstate()
    for kind in ("tfrecord", "folder", "tar"):
        for with_cache in (None, cache):
            check_equal(rows(in_store(kind, with_cache)), rows(source(root, kind)))
    assert random.getstate() == state  # weights are drawn from it


def test_a_store_that_does_not_come_back(store):
    def fault(_: int) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    stored = in_store("folder")
    store.fault = fault
    with pytest.raises(
        UsageError,
        match="^cannot read counted://data/folder/class0/00.png: Connection reset by peer; ",
    ):
        stored.read(np.arange(1))
    assert store.requests.count("cat_file") == stores._TRIES


def test_expired_credentials_are_named_at_once(store):
    class ClientError(Exception):
        __module__ = "botocore"
        response = {"Error": {"Code": "ExpiredToken"}}

    stored = in_store("folder")
    for error in (PermissionError(13, "Access Denied"), ClientError("too old")):
        store.forget()

        def fault(_: int, error: Exception = error) -> None:
            raise error

        store.fault = fault
        for skip in ("stop", "skip"):  # is no bad record
            with pytest.raises(UsageError, match="check or renew the credentials of the store$"):
                Streaming(stored, global_batch_size=8, on_bad_record=skip)
        assert len(store.requests) == 2


@pytest.mark.parametrize("kind", ["tfrecord", "click_lines", "folder"])
def test_a_file_that_changes_is_noticed(store, kind):
    """Of the same size, within 16 requests."""
    stored = in_store(kind)
    for path in [*store.store]:
        CountedStore().pipe_file(path, store.store[path].getvalue())
    with pytest.raises(UsageError, match="^counted://.* has changed in the store since this run b"):
        for _ in range(20):
            stored.read(np.arange(3))


@pytest.mark.parametrize("change", ["same size", "longer", "shorter", "gone"])
def test_of_a_larger_file_nothing_is_kept_that_is_not_of_it(cache, change):
    files = CountedStore()
    files.pipe_file("/large", bytes(2 << 20))
    file = remote.opened(StorePath("counted://large", cache))
    assert file.pread(10, 0) == bytes(10)
    for read in (file.pread, file.at_hand):  # as of a disk, the end is the end
        assert file.pread(100, file.size - 8) == read(100, file.size - 8) == bytes(8)
    length = {"same size": 0, "longer": 1, "shorter": -1}.get(change)
    if length is None:
        files.rm("/large")
    else:
        files.pipe_file("/large", b"1" * ((2 << 20) + length))
    errors = {None: "is missing|No such file"}
    with pytest.raises((UsageError, FileNotFoundError), match=errors.get(length, "has changed")):
        file.pread(10, file.size // 2)
    assert file.pread(10, 100) == bytes(10)  # is in the cache


def test_what_the_store_said_first_counts_once(cache):
    folder = StorePath("counted://first", cache)
    folder._store._store.write("a", bytes(10))
    before = (folder / "a").stat()
    folder._store._store.write("a", bytes(20))
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert (folder / "a").stat() == before and folder._store._bytes == 10


def test_what_is_missing(cache):
    with pytest.raises(UsageError, match="^counted://none is missing: give another path"):
        Files("counted://none")
    with pytest.raises(UsageError, match="^counted://data has no dataset 'mnist': prepare it"):
        load("mnist", data_dir="counted://data", global_batch_size=8)
    with pytest.raises(UsageError, match="^nosuch://a: .*nosuch"):
        Files("nosuch://a")
    with pytest.raises(UsageError, match="of a format that is read from a disk only: give a --da"):
        in_store("mapped")


def test_a_run_on_s3_is_that_on_the_disk(root, zygote, tmp_path):
    """A real server of S3: the weights have the same bits, also if another run goes on, whose data
    are in the cache."""
    with s3_server():
        environment = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
        place = stores.open_store("s3://runs/photos")
        for path in (root / "folder").rglob("*.png"):
            place.write(str(path.relative_to(root / "folder")), path.read_bytes())
        flags = ["--global_batch_size=8", "--resident_limit_mib=0", "--model=dense", "--noexport"]
        cached = ["--dataset=s3://runs/photos", f"--data_cache={tmp_path / 'cache'}:8MiB"]
        runs = {
            "disk": [([f"--dataset={root / 'folder'}"], 12)],
            "store": [(cached, 5), ([*cached, "--extend"], 12)],
        }
        weights = {}
        for name, parts in runs.items():
            for data, steps in parts:
                run = [f"--model_dir={tmp_path / name}", f"--train_steps={steps}", *data, *flags]
                zygote.run("ctl.train", *run, "--schedule=constant", **environment)
            (file,) = (tmp_path / name).glob("checkpoints/step-0000000012/variables.data*")
            weights[name] = file.read_bytes()
    assert weights["disk"] == weights["store"]
