"""Object stores: whole writes, ranged reads, errors with a remedy."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_stores import s3_server

from ctl.base import stores
from ctl.base.stores import NothingThere, Store, StoreError, is_url, open_store
from ctl.errors import UsageError

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture(params=["memory", "file", "s3"])
def store(request, tmp_path, monkeypatch) -> Store:
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.001)
    if request.param == "s3":
        request.getfixturevalue("s3")
    place = {"memory": "memory://", "file": f"file://{tmp_path}", "s3": "s3://runs"}[request.param]
    return open_store(f"{place}/{tmp_path.name}/{request.node.name}")


def test_urls():
    assert is_url("s3://bucket/run") and is_url("memory://x") and is_url("file:///tmp/x")
    with pytest.raises(UsageError, match="give s3://… as text"):
        is_url(Path("s3://bucket/run"))
    assert not any(map(is_url, ["/tmp/run", "run", "C:/run", "ram://run", "a b://", ""]))


def test_what_is_written_is_read_listed_and_deleted(store: Store, tmp_path):
    assert store.list() == {} and not store.exists("a/b")
    store.write("a/b", b"0123456789")
    store.write("ab", b"x")
    assert store.list() == {"a/b": 10, "ab": 1} and store.list("a") == {"a/b": 10}
    assert store.read("a/b") == b"0123456789" and store.read("a/b", 2, 5) == b"234"
    with pytest.raises(FileExistsError):
        store.write("a/b", b"other", only_new=True)
    store.write("new", b"one", only_new=True)
    store.write("a/b", b"replaced")
    assert store.read("a/b") == b"replaced" and store.size("new") == 3
    store.delete(["a/b", "not there", "ab"])
    assert store.list() == {"new": 3}
    for read in (store.read, store.size, lambda name: store.download(name, tmp_path / "no")):
        with pytest.raises(FileNotFoundError):
            read("a/b")
    assert not (tmp_path / "no").exists()


def test_large_files_go_in_parts(store: Store, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_PART", 5 << 20)  # the least of S3
    content = bytes(range(256)) * (48 << 10)
    (tmp_path / "large").write_bytes(content)
    store.upload("large", tmp_path / "large")
    assert store.size("large") == len(content)
    before = store.requests
    store.download("large", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content
    assert store.requests - before == 1 + 3
    assert not list(tmp_path.glob("tmp-*"))


def fails(store: Store, monkeypatch, *errors: Exception) -> None:
    """The next reads of ``store`` fail so."""
    left = list(errors)
    read = store._fs.cat_file

    def cat_file(*arguments, **keywords):
        if left:
            raise left.pop(0)
        return read(*arguments, **keywords)

    monkeypatch.setattr(store._fs, "cat_file", cat_file)


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_transient_error_is_tried_again_and_a_lasting_one_is_not(store: Store, monkeypatch):
    store.write("a", b"x")
    fails(store, monkeypatch, OSError(16, "slow down"), TimeoutError(), ConnectionResetError())
    assert store.read("a") == b"x" and store.requests == 1 + 4
    fails(store, monkeypatch, *[OSError(16, "slow down")] * 9)
    with pytest.raises(StoreError, match="cannot read memory://.*/a: slow down; see whether"):
        store.read("a")
    assert store.requests == 1 + 4 + stores._TRIES
    for error, remedy in (
        (PermissionError("Access Denied"), "Access Denied; check or renew the credentials"),
        (PermissionError("The provided token has expired."), "renew the credentials"),
        (OSError(28, "No space left on device"), "delete something there"),
    ):
        before = store.requests
        fails(store, monkeypatch, error)
        with pytest.raises(StoreError, match=remedy) as raised:
            store.read("a")
        assert raised.value.lasting and raised.value.exit_code == 4
        assert store.requests == before + 1
    monkeypatch.setattr(store._fs, "cat_file", lambda *_, **__: [][0])
    with pytest.raises(IndexError):  # a bug stays one
        store.read("a")


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_store_that_does_not_answer_is_given_up(store: Store, monkeypatch):
    import threading

    never = threading.Event()
    monkeypatch.setattr(stores, "_SECONDS", 0.01)
    monkeypatch.setattr(store._fs, "cat_file", lambda *_, **__: never.wait())
    with pytest.raises(StoreError, match=r"no answer in 0\.01 s"):
        store.read("a")
    never.set()


def test_no_such_bucket_and_wrong_keys(s3, monkeypatch):
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.001)
    with pytest.raises(StoreError, match="no such bucket .*; make it"):
        open_store("s3://missing/run").write("a", b"x")
    with pytest.raises(StoreError, match=r"no such bucket \(missing\); make it"):
        open_store("s3://missing/run").check_bucket()
    open_store("s3://runs/run").check_bucket()


def test_a_server_that_is_down(monkeypatch):
    pytest.importorskip("s3fs")
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.001)
    for name, value in (
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"Could not connect .*; see whether the store"):
        open_store("s3://runs/down").read("a")


def test_a_missing_package_names_the_extra(monkeypatch):
    load = builtins.__import__

    def missing(name, *arguments, **keywords):
        if name.split(".")[0] in ("fsspec", "gcsfs"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *arguments, **keywords)

    with pytest.raises(UsageError, match="fsspec knows no nothing://"):
        open_store("nothing://x")
    for name in [name for name in sys.modules if name.split(".")[0] in ("fsspec", "gcsfs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match=r"gs://x needs a package: pip install 'ctl\[gcs\]'"):
        open_store("gs://x")
    with pytest.raises(UsageError, match=r"memory://x needs .*: pip install 'ctl\[stores\]'"):
        open_store("memory://x")


def test_odd_names_and_a_disk_that_takes_parts(store: Store, tmp_path, monkeypatch):
    """What no file can be called is passed over, and the rest is whole."""
    content = bytes(range(256)) * 40
    store.write("good", content)
    odd = ["a/../../out", "n" * 300, "\0"] if not store.url.startswith("file") else []
    odd += ["plain", "plain/below"] if store.url.startswith("s3") else []
    for name in odd:
        store._fs.pipe_file(store._place(name), content)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:999], at))
    stores.copy(store, store.list(), tmp_path / "copy")
    assert (tmp_path / "copy/good").read_bytes() == content
    assert not [*tmp_path.rglob("out"), *tmp_path.glob("copy/n*")]


def test_no_entry_leads_out_of_its_folder(monkeypatch):
    """Files of data are copied by these names."""
    store = open_store("memory://data")
    found = [
        {"name": f"/data/{n}", "type": "file", "size": 1, "created": 1.0} for n in ("a", "..", ".")
    ]
    monkeypatch.setattr(store._fs, "ls", lambda *arguments, **keywords: found)
    assert [*store.entries()] == ["a"]


def test_an_empty_bucket():
    with pytest.raises(NothingThere, match="memory://empty-bucket: there is nothing"):
        stores.local("memory://empty-bucket")
