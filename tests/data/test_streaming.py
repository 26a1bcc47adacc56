from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
import stored_sources
import tensorflow as tf
import tensorflow_datasets as tfds
import tiny_tfds
from stored_sources import COUNT
from stored_sources import SOURCES as KINDS

import ctl.data
from ctl.data import clicks, streaming
from ctl.data.errors import translate_data_errors
from ctl.data.feed import open_batches
from ctl.data.load import read_all
from ctl.data.records import ArrayRecords, BadRecord, TFRecords
from ctl.data.sources import Arrays, EncodedImages, ImageFolder, Items, JsonLines, Source, mapped
from ctl.data.streaming import Streaming
from ctl.data.tfds_source import ImageSource, Split, find
from ctl.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Of each kind; the first number of an example is its own."""
    root = tmp_path_factory.mktemp("sources")
    stored_sources.write(root)
    tiny_tfds.prepare(tiny_tfds.CtlTinyUnlabelled, str(root / "tfrecord"))
    tiny = find("ctl_tiny_color", str(root / "tfrecord"))
    return {
        **stored_sources.opened(root),
        "validation": ImageSource(tiny, "validation"),
        "resized": ImageSource(tiny, "train", (9, 7, 3)),
        "unlabelled": ImageSource(find("ctl_tiny_unlabelled", str(root / "tfrecord")), "train"),
        "root": root,
    }


def numbers(batch) -> np.ndarray:
    """The number of each example, [n], whatever the source."""
    if isinstance(batch, dict):
        batch = batch["number"] if "number" in batch else batch["image"]
    first = batch[0] if isinstance(batch, tuple) else batch
    first = np.asarray(first["dense"] if isinstance(first, dict) else first)
    return first[(slice(None), *[0] * (first.ndim - 1))]


def batches(dataset: Streaming, start: int, count: int) -> list[np.ndarray]:
    elements = dataset.batches(start).take(count).as_numpy_iterator()
    return [numbers(dataset.on_replica(element, ())) for element in elements]


def test_every_source_has_an_example(sources):
    """`stored_sources` is what this file and `test_sources_over_workers.py` read."""
    streams = [stored_sources.stream(sources["root"], kind, 8) for kind in stored_sources.KINDS]
    examples = {type(stream._source) for stream in streams}
    modules = [import_module(f"ctl.data.{one.name}") for one in iter_modules(ctl.data.__path__)]
    classes = {c for one in modules for c in vars(one).values() if inspect.isclass(c)}
    kinds = {c for c in classes if hasattr(c, "read") and hasattr(c, "__len__")}
    # Base classes, and the files of an `ImageSource`.
    kinds -= {Source, EncodedImages, clicks.Clicks, Split, TFRecords, ArrayRecords}
    assert kinds and kinds <= examples


@pytest.mark.parametrize("kind", KINDS)
def test_any_source_gives_the_same_batches_to_any_number_of_workers(sources, kind):
    """Every epoch has every example once, a late start continues the same sequence, and the shares
    of the replicas of 1 to 8 workers make up the global batch."""
    make = functools.partial(Streaming, sources[kind], global_batch_size=8, seed=3)
    whole = batches(make(), 0, 25)  # 4 epochs of 50
    epochs = np.concatenate(whole).reshape(4, COUNT)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    if kind == "data_source":  # TFDS orders by hashes of keys, as it does for the others of TFDS
        assert all(len(set(epoch)) == COUNT for epoch in epochs)
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    np.testing.assert_array_equal(
        np.concatenate(batches(make(), 7, 3)), np.concatenate(whole[7:10])
    )
    dataset = make()
    for workers in (1, 2, 4, 8) if kind in ("tfrecord", "mapped") else (2,):
        width = 8 // workers
        parts = [
            dataset.shares(7, range(worker * width, worker * width + width), 8)
            .take(width)
            .as_numpy_iterator()
            for worker in range(workers)
        ]
        got = [numbers(dataset.on_replica(share, ())) for part in parts for share in part]
        np.testing.assert_array_equal(np.concatenate(got), whole[7])


@pytest.mark.parametrize(("replicas", "count"), [(1, 9), (2, 12), (2, 5), (4, 9), (4, 5), (4, 1)])
def test_shares_are_those_that_tensorflow_makes(mirrored, replicas, count):
    """Of an evaluation, in order; also where the last replicas have no examples."""
    strategy = mirrored(replicas)
    dataset = Streaming(np.arange(12 + count), global_batch_size=12, training=False)
    own = strategy.experimental_distribute_dataset(
        tf.data.Dataset.range(12 + count).batch(12).map(lambda x: x)
    )
    iterator = open_batches(dataset, strategy, again=True)
    parts = strategy.experimental_local_results
    for theirs in [*own] * 2:
        ours = dataset.on_replica(next(iterator), ())
        for a, b in zip(parts(ours), parts(theirs), strict=True):
            np.testing.assert_array_equal(a, b)


def test_small_shares_are_read_together():
    def together(replicas, of_one=8, quick=False, **options):
        source = Arrays(np.zeros([64, of_one], np.uint8))
        source.reads_quickly = quick
        dataset = Streaming(source, global_batch_size=64, **options)
        return dataset.equal_shares(replicas)[1]

    assert [together(replicas) for replicas in (1, 2, 8, 64)] == [1, 2, 8, 64]
    of_steps = [together(replicas, quick=True) for replicas in (1, 2, 8)]
    assert of_steps == [8, 16, 64] and TFRecords.reads_quickly
    assert together(3) == together(8, training=False) == 1  # shares may be empty
    assert together(8, of_one=1 << 20) == 1  # a share has 8 MB
    assert together(64, of_one=1 << 20) == 15
    assert together(128) == 1


class Records:
    def __init__(self, examples, decode):
        self.examples, self.decode = examples, decode

    def __len__(self):
        return len(self.examples)

    def read(self, indices):
        return [self.examples[index] for index in indices]


def test_examples_that_are_only_parsed_are_decoded_together():
    def parse(record):
        found = tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([2], tf.float32)})
        return tf.cast(found["x"], tf.int32)

    def computed(record):
        return parse(record) + 0

    examples = [
        tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString()
        for feature in (
            tf.train.Feature(float_list=tf.train.FloatList(value=[k, -k])) for k in range(11)
        )
    ]
    for size, replicas in ((4, 1), (4, 3), (1, 2)):  # also shares without examples
        found = []
        for decode in (parse, computed):
            dataset = Streaming(Records(examples, decode), global_batch_size=size, training=False)
            assert dataset._decodes_together == (decode is parse)
            shares = dataset.shares(0, range(replicas), replicas).as_numpy_iterator()
            found.append([batch for _, batch in shares])
        assert len(found[0]) == len(found[1])
        for together, each in zip(*found, strict=True):
            np.testing.assert_array_equal(together, each, strict=True)


def test_keys_are_the_epoch_and_the_index(sources):
    dataset = Streaming(sources["mapped"], global_batch_size=8)
    keys = np.concatenate([keys for keys, _ in dataset.batches().take(25).as_numpy_iterator()])
    np.testing.assert_array_equal(keys[:, 0], np.repeat(np.arange(4), COUNT))
    np.testing.assert_array_equal(keys[:, 1], np.concatenate(batches(dataset, 0, 25)))


def test_training_batches_are_endless_and_static(sources, mirrored):
    dataset = Streaming(sources["resized"], global_batch_size=8)
    assert dataset.batches().cardinality() == tf.data.INFINITE_CARDINALITY
    _, (images, labels) = open_batches(dataset, mirrored(2)).element_spec
    assert images._component_specs[0] == tf.TensorSpec([4, 9, 7, 3], tf.uint8)
    _, (images, labels) = next(iter(dataset.batches()))
    np.testing.assert_array_equal(images.numpy()[:, 8, 6, 2] % 5, labels)


def test_evaluation_of_files_is_in_their_order(sources, mirrored):
    source, strategy, seen = sources["validation"], mirrored(4), []
    dataset = Streaming(source, global_batch_size=5, training=False)
    for element in open_batches(dataset, strategy):  # the last two of 4 replicas have no examples
        images, _ = dataset.on_replica(element, ())
        seen += [numbers(part) for part in strategy.experimental_local_results(images)]
    stored = find("ctl_tiny_color", str(sources["root"] / "tfrecord")).as_dataset(
        split="validation", batch_size=7, read_config=tfds.ReadConfig(interleave_cycle_length=1)
    )
    wanted = numbers(next(stored.as_numpy_iterator()))
    for found in (seen, batches(dataset, 0, 9), [numbers(read_all(source))]):
        np.testing.assert_array_equal(np.concatenate(found), wanted)
    assert len(batches(dataset, 0, 9)) == 2


def cut_short(path):
    short = path.with_name("short.npy")
    short.write_bytes(path.read_bytes()[:-8])
    return short


def streamed(items) -> None:
    dataset = Streaming(items, global_batch_size=1, training=False)
    with translate_data_errors(dataset):
        list(dataset.batches())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda s: Streaming(s["unlabelled"], global_batch_size=8), "no labels"),
        (lambda s: Streaming(s["mapped"], global_batch_size=51), "51 is larger .* has 50 examples"),
        (lambda s: Streaming(s["mapped"], global_batch_size=8, block=0), "block of a shuffle"),
        (lambda s: Streaming(s["mapped"], global_batch_size=8, block=26), "at most 25$"),
        (lambda s: Streaming(s["mapped"], global_batch_size=8, on_bad_record="x"), "stop or skip"),
        (lambda s: Streaming(5, global_batch_size=8), "a int is not a source"),
        (
            lambda s: Streaming((np.zeros(3), np.zeros(4)), global_batch_size=1),
            "must have one length",
        ),
        (lambda s: ImageFolder(s["root"] / "folder/class0", (4, 6, 3)), "has no images"),
        (lambda s: JsonLines([s["root"] / "c.jsonl"]), "c.jsonl is missing"),
        (lambda s: TFRecords([]), "no files"),
        (lambda s: mapped(s["root"] / "b.npy"), "b.npy is missing"),
        (lambda s: mapped(cut_short(s["root"] / "array.npy")), "cannot be read as .npy: mmap len"),
        (lambda s: TFRecords(["none://bucket/a"]), "^none://bucket/a: fsspec knows no none://"),
        (lambda s: ImageFolder("none://bucket/a", (4, 6, 3)), "^none://bucket/a: fsspec knows no"),
        (lambda s: find("mnist", "none://bucket/a"), "^none://bucket/a: fsspec knows no"),
        (lambda s: Streaming(np.array(5), global_batch_size=1), "their shapes are"),
        (lambda s: Streaming([None], global_batch_size=1), "objects .NoneType.: make numbers"),
        (lambda s: Streaming([[[1], [1, 2]]], global_batch_size=1), "0: it has lists of different"),
        (lambda s: streamed([{"a": 1}, {"b": 1}]), r"items, example 1: \['a'\] is missing"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_once(sources, make, says):
    with pytest.raises(UsageError, match=says) as error:
        make(sources)
    assert "\n" not in str(error.value)


@pytest.fixture
def forbidden(tmp_path):
    """A file that may not be read, also not by root."""
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield tmp_path / "file"
    if root:
        os.seteuid(0)


def test_what_may_not_be_read(forbidden):
    for make in (TFRecords, ArrayRecords, JsonLines):
        with pytest.raises(UsageError, match="file cannot be read: Permission denied"):
            len(make([forbidden]))
    for make in (mapped, lambda path: ImageFolder(path, (4, 6, 3))):
        with pytest.raises(UsageError, match="file cannot be read: (Permission|Not a directory)"):
            make(forbidden)


def test_fingerprint_tells_content_and_order(sources):
    def of(kind: str = "tfrecord", **kwargs) -> dict:
        return Streaming(sources[kind], global_batch_size=7, **kwargs).fingerprint()

    assert of() == of()
    assert all(other != of() for other in (of("validation"), of(seed=1), of(block=3)))
    assert len({of(kind)["content"] for kind in KINDS if kind != "data_source"}) == 10


def test_files_of_the_same_size_with_other_contents_are_other_data(tmp_path):
    """Copies of the files are the same data, whatever their times."""

    def known(folder):
        return Streaming(TFRecords(sorted(folder.iterdir())), global_batch_size=2).fingerprint()

    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        with tf.io.TFRecordWriter(str(tmp_path / "data" / name)) as file:
            for number in range(30):
                file.write(f"{name}{number:1000}".encode())
    before = known(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "a", (1, 1))
    assert known(tmp_path / "copy") == before
    changed = bytearray((tmp_path / "copy" / "b").read_bytes())
    changed[len(changed) // 2 + 300] ^= 1
    (tmp_path / "copy" / "b").write_bytes(changed)
    assert known(tmp_path / "copy") != before


def test_sources_without_a_hash_are_known_by_some_examples(tmp_path, warnings_of):
    def known(source):
        return Streaming(source, global_batch_size=2, on_bad_record="skip").fingerprint()["samples"]

    def folder(color):
        for label in "ab":
            (tmp_path / label).mkdir(exist_ok=True)
            pixels = np.full([1, 1, 3], color, np.uint8)
            (tmp_path / label / "0.png").write_bytes(tf.io.encode_png(pixels).numpy())
        return ImageFolder(tmp_path, (1, 1, 3))

    class Noisy(list):
        def __getitem__(self, index):
            return np.random.default_rng().normal(size=3)

    assert known(list(range(20))) == known(list(range(20))) != known(list(range(1, 21)))
    assert known(Flawed(unreadable=[0, 19])) == known(Flawed(unreadable=[0, 19])) is not None
    assert known(folder(1)) != known(folder(2))
    assert not any("other examples" in said for said in warnings_of())
    assert known(Noisy(range(20))) is None
    assert "other examples each time they are read" in warnings_of()[-1]


def test_labels_belong_to_their_images(sources):
    for kind, label_of in (("folder", lambda n: n // 10), ("array_record", lambda n: n % 5)):
        images, labels = read_all(sources[kind])
        np.testing.assert_array_equal(labels, label_of(images[:, 0, 0, 0]))
    rows = read_all(sources["json"])
    assert [text.decode() for text in rows["text"][:3]] == ["", "é", "éé"]
    np.testing.assert_array_equal(rows["row"], [[n, 1.5] for n in range(COUNT)])


class Flawed:
    """Strings, some of which cannot be read, and some not decoded."""

    def __init__(self, unreadable=(), undecodable=(), count=20):
        self.unreadable, self.undecodable, self.count = unreadable, undecodable, count

    def __len__(self):
        return self.count

    def read(self, indices):
        for index in indices.tolist():
            if index in self.unreadable:
                raise BadRecord(index, self.where(index))
        return [b"x" if i in self.undecodable else str(i).encode() for i in indices.tolist()]

    def decode(self, string):
        return tf.strings.to_number(string, tf.int64)

    def where(self, index):
        return f"shard {index // 10}, record {index % 10}"


def test_bad_records_stop_with_their_name_or_are_replaced_alike_on_all_workers():
    for bad, says in (
        (Flawed(unreadable=[13]), "damaged: shard 1, record 3"),
        (Flawed(undecodable=[17]), "shard 1, record 7 cannot be decoded"),
    ):
        dataset = Streaming(bad, global_batch_size=4)
        with pytest.raises(UsageError, match=says) as error, translate_data_errors(dataset):
            list(dataset.batches().take(5))
        assert "\n" not in str(error.value) and "--on_bad_record=skip" in str(error.value)
    flawed = Flawed(unreadable=[0, 13, 19], undecodable=[1, 14, 17])
    skip = functools.partial(Streaming, flawed, global_batch_size=4, on_bad_record="skip")
    want = np.arange(20)
    want[[0, 1, 13, 14, 17, 19]] = [2, 2, 15, 15, 18, 2]
    in_order = skip(training=False)
    np.testing.assert_array_equal(np.concatenate(batches(in_order, 0, 5)), want)
    assert in_order._skipped == {0, 1, 13, 14, 17, 19}
    whole = np.concatenate(batches(skip(), 0, 5))
    parts = [skip().shares(0, range(w, w + 1), 2).take(5).as_numpy_iterator() for w in range(2)]
    shares = [[values for _, values in part] for part in parts]
    np.testing.assert_array_equal(whole.reshape(5, 2, 2), np.stack(shares, axis=1))
    every = Flawed(unreadable=range(20))
    with pytest.raises(UsageError, match="too many to skip"):
        Streaming(every, global_batch_size=4, on_bad_record="skip")


def test_items_that_fail_or_differ_are_named():
    def fails(number: int):
        if number == 7:
            raise OSError("no such picture")
        return {"number": number, "x": np.zeros(2 if number != 8 else 3)}

    for chosen, says in (
        (range(8), "items, example 7: OSError"),
        ((1, 8), r"example 8: \['x'\] is float64\[3\], but float64\[2\] in others: make all"),
    ):
        with pytest.raises(BadRecord, match=says):
            Items(list(range(9)), fails).read(np.array(list(chosen)))
    (short,) = [Streaming(Items(list(range(9)), fails), global_batch_size=9)]
    with pytest.raises(UsageError, match="example 7: OSError"), translate_data_errors(short):
        next(iter(short.batches()))


def json_lines(path, text: str | bytes, **options) -> tuple[Streaming, Any]:
    """A stream of the lines of ``text``, and what it reads of all."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    stream = Streaming(JsonLines([path]), global_batch_size=2, training=False, **options)
    return stream, stream.read(np.arange(stream.num_examples))


@pytest.mark.parametrize("numbers", [(10, 10.5, 3), (10.5, 3, 10), (3, 4, 2**53)])
def test_numbers_of_json_have_the_type_of_all(tmp_path, numbers):
    lines = "".join(json.dumps({"x": n, "y": [n, 1]}) + "\n" for n in numbers)
    _, got = json_lines(tmp_path / "a", lines)
    np.testing.assert_array_equal(got["x"], numbers)
    assert got["x"].dtype == got["y"].dtype == np.array(numbers).dtype


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"x": null, "y": [1]}', r"\['x'\] has Python objects .NoneType.: make numbers"),
        ('{"x": "a", "y": [1]}', r"\['x'\] is string\[\] \(b'a'\), but int64\[\] in others"),
        ('{"x": true, "y": [1]}', r"\['x'\] is bool\[\] \(True\), but int64"),
        ('{"x": 1267650600228229401496703205376, "y": [1]}', r"\['x'\] has Python objects .int."),
        ('{"x": 1, "y": [1, 2]}', r"\['y'\] is int64\[2\], but int64\[1\] in others"),
        ('{"x": 1, "y": ["a"]}', r"\['y'\] is string\[1\] \('a'\), but int64\[1\]"),
        ('{"x": 1, "y": [1, "a"]}', r"\['y'\] has numbers beside strings"),
        ('{"x": 1, "y": [[1], [1, 2]]}', r"\['y'\] has lists of different lengths"),
        ('{"x": 1}', r"\['y'\] is missing: make all examples alike"),
        ('{"x": 1, "y": [1], "z": 1}', r"\['z'\] is in no other example"),
        ("[1, 2]", r"\['x'\] is missing"),
        ('{"x": 1, "y"', "it is not JSON: Expecting ':' delimiter at character 13"),
        (b'{"x": "\xe9", "y": [1]}', "it is not UTF-8: invalid continuation byte at byte 7"),
    ],
)
def test_a_line_of_another_form_is_named_or_skipped(tmp_path, monkeypatch, line, says):
    """Also where it is not in the sample."""
    line = line if isinstance(line, bytes) else line.encode()
    good = b"".join(b'{"x": %d, "y": [1]}\n' % n for n in range(3))
    _, got = json_lines(tmp_path / "a", line + b"\n" + good, on_bad_record="skip")
    assert got["x"].tolist() == [0, 0, 1, 2]
    for sampled in (128, 2):
        monkeypatch.setattr(ctl.data.sources, "_SAMPLED", sampled)
        text = good + line + b"\n" + good
        with pytest.raises(UsageError, match=f"damaged: a, line 4: {says}.*; prepare") as error:
            json_lines(tmp_path / "a", text)
        assert "\n" not in str(error.value) and "--on_bad_record=skip" in str(error.value)
        stream, got = json_lines(tmp_path / "a", text, on_bad_record="skip")
        assert stream._skipped == {3} and got["x"].tolist() == [0, 1, 2, 0, 0, 1, 2]


def test_blank_lines_are_no_examples(tmp_path):
    texts = ["\n \t\n{0}\n\n{1}\n   \n{2}\n\n", "{0}\r\n\r\n{1}\r\n{2}", "\ufeff{0}\n{1}\n\n{2}  "]
    for text in texts:
        for name, value in enumerate(('{"x": 5}', '{"x": 6}', '{"x": 7}')):
            text = text.replace(f"{{{name}}}", value)
        stream, got = json_lines(tmp_path / "a", text)
        assert got["x"].tolist() == [5, 6, 7] and stream.num_examples == 3
        last = len(text.rstrip().splitlines())
        assert stream.where(2) == f"a, line {last}"
    with pytest.raises(UsageError, match="the dataset has no examples"):
        json_lines(tmp_path / "a", " \n\n")


def test_decode_may_depend_on_tensors():
    class Signs(Flawed):
        def decode(self, string):
            number = tf.strings.to_number(string, tf.int64)
            if number % 2 == 0:  # AutoGraph makes this a part of the graph
                return number
            return -number

    for options in ({}, {"on_bad_record": "skip"}):
        dataset = Streaming(Signs(), global_batch_size=4, training=False, **options)
        got = np.concatenate([values for _, values in dataset.batches().as_numpy_iterator()])
        np.testing.assert_array_equal(np.abs(got), np.arange(20))
        assert (got[1::2] < 0).all() and (got[::2] >= 0).all()


def test_the_example_to_blame_is_not_searched_for_long(monkeypatch):
    dataset = Streaming(Flawed(undecodable=[7]), global_batch_size=4, training=False)
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(dataset.batches())
    assert dataset.culprit() == "shard 0, record 7"
    monkeypatch.setattr(streaming, "_CULPRIT_SECONDS", 0.0)
    assert dataset.culprit() == ""


def test_classes_without_images_keep_the_labels(sources, tmp_path):
    train = sources["folder"]
    names = train.info.class_names
    shutil.copytree(sources["root"] / "folder", tmp_path / "test")
    shutil.rmtree(tmp_path / "test" / names[0])
    test = ImageFolder(tmp_path / "test", (4, 6, 3), classes=names)
    wanted = set(range(1, len(names)))
    assert {int(test.read(np.array([n]))[1][0]) for n in range(len(test))} == wanted
    with pytest.raises(UsageError, match=f"has a folder {names[1]} that is not in classes"):
        ImageFolder(tmp_path / "test", (4, 6, 3), classes=names[:1])


@pytest.mark.parametrize("says", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk_is_not_exhausted_memory(says):
    with (
        pytest.raises(CheckpointError, match=f"^no space left: x.png; {says}$"),
        translate_data_errors(None),
    ):
        raise tf.errors.ResourceExhaustedError(None, None, f"x.png; {says}")
    with (
        pytest.raises(UsageError, match="^out of memory: OOM when allocating"),
        translate_data_errors(None),
    ):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating a tensor")
