from __future__ import annotations

import contextlib
import http.server
import pathlib
import shutil
import socket
import threading

import numpy as np
import pytest
import tensorflow_datasets as tfds
import tiny_tfds

from ctl.data import load, tfds_source
from ctl.data.errors import translate_data_errors
from ctl.data.load import read_all
from ctl.data.tfds_source import EMBEDDED, ImageSource, find
from ctl.errors import UsageError

TRAIN_FILE = "fashion_mnist_mini/1.0.0/fashion_mnist_mini-train.tfrecord-00000-of-00001"


@pytest.fixture(scope="module", autouse=True)
def no_progress_bar():
    tfds.disable_progress_bar()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("tfds"))
    tiny_tfds.prepare(tiny_tfds.CtlTinyColor, root, shards=3)
    for builder in (tiny_tfds.CtlTinySizes, tiny_tfds.CtlTinyNoPair, tiny_tfds.CtlTinyText):
        tiny_tfds.prepare(builder, root)
    return root


@pytest.fixture
def copy(tmp_path):
    """A copy of the embedded dataset in a data_dir of its own, to be damaged."""
    shutil.copytree(EMBEDDED / "fashion_mnist_mini", tmp_path / "fashion_mnist_mini")
    return tmp_path


@contextlib.contextmanager
def refused(says: str):
    """With one line, and the exit code of a wrong use."""
    with pytest.raises(UsageError, match=says) as error:
        yield
    assert "\n" not in str(error.value) and error.value.exit_code == 2


def test_the_embedded_dataset_is_found_without_a_data_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds, "builder", None)  # it imports hundreds of modules
    builder = find("fashion_mnist_mini", str(tmp_path), download=False)
    assert pathlib.Path(builder.data_dir) == EMBEDDED / "fashion_mnist_mini/1.0.0"


@pytest.mark.parametrize("version", ["", ":1.0.0"])
def test_the_data_dir_of_the_user_comes_first(copy, version):
    assert str(copy) in str(find(f"fashion_mnist_mini{version}", str(copy)).data_dir)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fashion_mnist_mimi", "fashion_mnist_mini, fashion_mnist"),
        ("fashion_mnist_mini:7.0.0", "no dataset"),
        ("mnist:9.9.9", "3.0.1"),
        ("../mnist", "cannot be opened"),
        ("mnist", "not prepared at .*allow the download"),
    ],
)
def test_names_that_are_not_found(name, says, tmp_path):
    with refused(says):
        find(name, str(tmp_path), download=False)


def test_a_host_that_refuses(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    urls = {f"http://127.0.0.1:{port}/x": None}
    monkeypatch.setattr(tiny_tfds.CtlTinyDownload, "url_infos", urls)
    with refused(f"127.0.0.1:{port} cannot be reached .*refused"):
        find("ctl_tiny_download", str(tmp_path))


def test_hosts_and_resolvers_that_stay_silent_cost_one_time_limit(tmp_path, monkeypatch):
    release = threading.Event()
    resolve = socket.getaddrinfo

    def hang(host, *args, **kwargs):
        if host == "silent.invalid":
            release.wait(60)
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(tfds_source, "PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = ["http://silent.invalid/x", f"http://127.0.0.1:{silent.getsockname()[1]}/x"]
        monkeypatch.setattr(tiny_tfds.CtlTinyDownload, "url_infos", dict.fromkeys(urls))
        with refused(r"silent.invalid cannot be reached \(no answer"):
            find("ctl_tiny_download", str(tmp_path))
    release.set()


class _Server(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_HEAD(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "5")
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(b"hello")

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{running.server_port}/file.txt"
        monkeypatch.setattr(tiny_tfds.CtlTinyDownload, "url_infos", {url: None})
        yield url
        running.shutdown()
        thread.join()


def test_download_from_a_server(server, tmp_path):
    builder = find("ctl_tiny_download", str(tmp_path))
    assert len(ImageSource(builder, "train")) == 50
    assert list((tmp_path / "downloads").glob("**/*file*"))


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (503, "cannot be reached .HTTP 503"),
        (404, "preparing it failed: .*404"),
        (403, "preparing it failed: .*403"),
    ],
)
def test_a_server_that_does_not_have_it(server, status, says, tmp_path, monkeypatch):
    monkeypatch.setattr(_Server, "status", status)
    with refused(says):
        find("ctl_tiny_download", str(tmp_path))


def test_read_gives_the_examples_in_the_order_of_the_files(data_dir):
    builder = find("ctl_tiny_color", data_dir)
    source = ImageSource(builder, "train")
    images, labels = read_all(source)
    expected = builder.as_dataset(
        split="train", read_config=tfds.ReadConfig(interleave_cycle_length=1), as_supervised=True
    )
    assert len(source) == 50 and images.dtype == np.uint8 and labels.dtype == np.int64
    for image, label, (expected_image, expected_label) in zip(
        images, labels, expected.as_numpy_iterator(), strict=True
    ):
        np.testing.assert_array_equal(image, expected_image)
        assert label == expected_label == image[0, 0, 0] % 5
    assert source.info.image_shape == (4, 6, 3)
    assert source.info.num_classes == 5 and source.info.class_names == ("a", "b", "c", "d", "e")


def test_splits_may_be_parts_and_sums(data_dir):
    builder = find("ctl_tiny_color", data_dir)
    images, labels = read_all(ImageSource(builder, "train[10:20]+validation"))
    whole, _ = read_all(ImageSource(builder, "train"))
    np.testing.assert_array_equal(images[:10], whole[10:20])
    assert len(labels) == 17


@pytest.mark.parametrize(
    ("split", "says"),
    [(split, "it has train, validation") for split in ("test", "train[", "train[:200%]", "")]
    + [("train[:0]", "no examples")],
)
def test_splits_without_examples(split, says, data_dir):
    with refused(says):
        ImageSource(find("ctl_tiny_color", data_dir), split)


def test_images_of_varying_sizes_need_a_shape(data_dir):
    builder = find("ctl_tiny_sizes", data_dir)
    with refused("vary in size.*image_shape"):
        ImageSource(builder, "train")
    with refused("the 1 channels"):
        ImageSource(builder, "train", (8, 8, 3))
    images, labels = read_all(ImageSource(builder, "train", (8, 8, 1)))
    assert images.shape == (50, 8, 8, 1) and images.dtype == np.uint8
    # Every image has one value, so resizing must not change it.
    np.testing.assert_array_equal(images, images[:, :1, :1] + np.zeros_like(images))
    np.testing.assert_array_equal(images[:, 0, 0, 0] % 5, labels)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ctl_tiny_no_pair", r"image \(Image\), label \(ClassLabel\), note \(Text\)"),
        ("ctl_tiny_text", r"note \(Text\) with label \(ClassLabel\)"),
    ],
)
def test_datasets_that_are_no_images_with_labels(name, says, data_dir):
    with refused(says):
        ImageSource(find(name, data_dir), "train")


def test_truncated_files(copy):
    path = copy / TRAIN_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with refused("truncated"):
        ImageSource(find("fashion_mnist_mini", str(copy)), "train")
    assert len(ImageSource(find("fashion_mnist_mini", str(copy)), "test")) == 2_000


def test_a_missing_file(copy):
    (copy / TRAIN_FILE).unlink()
    with refused("missing"):
        ImageSource(find("fashion_mnist_mini", str(copy)), "train")


def test_damaged_records(copy):
    path = copy / TRAIN_FILE
    content = bytearray(path.read_bytes())
    content[10_000] ^= 255
    path.write_bytes(content)
    shard = "fashion_mnist_mini-train.tfrecord-00000-of-00001, record 18: corrupted record"
    part = {"split": "train[:64]", "global_batch_size": 32}
    for limit in (0, 1000):  # streamed, and in memory
        with refused(f"fashion_mnist_mini/1.0.0 .*damaged: {shard}"):
            streamed = load(data_dir=str(copy), resident_limit_mib=limit, **part)
            with translate_data_errors(streamed):
                list(streamed.batches().take(2))
    with refused("damaged"):
        read_all(ImageSource(find("fashion_mnist_mini", str(copy)), "train[:64]"))
    images, labels = load(data_dir=str(copy), on_bad_record="skip", **part).arrays
    intact_images, intact_labels = load(**part).arrays
    intact_images[18], intact_labels[18] = intact_images[19], intact_labels[19]
    np.testing.assert_array_equal(images, intact_images)
    np.testing.assert_array_equal(labels, intact_labels)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
def test_damaged_metadata(name, copy):
    (copy / "fashion_mnist_mini/1.0.0" / name).write_text("{")
    with refused(str(copy)):
        find("fashion_mnist_mini", str(copy))
