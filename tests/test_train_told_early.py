"""Mistakes in Python, in code of the user's and in what flags name: one line each, and early."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, make_loop, mlp

from ctl.base import tracebacks
from ctl.control.evaluator import Evaluator
from ctl.data import InMemory, Streaming
from ctl.data.dataset import DatasetInfo
from ctl.errors import UsageError
from ctl.flags import early
from ctl.jobs import named
from ctl.jobs.build import make_eval_step
from ctl.phases import losses
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep

TRAIN = "ctl.train"


def ending(units: int, activation: str | None):
    return lambda: keras.Sequential(
        [keras.Input([FEATURES]), keras.layers.Dense(units, activation, name="last")]
    )


def loop_of(labels, *, kind=InMemory, model=mlp, **options):
    labels = np.asarray(labels)
    arrays = np.zeros([len(labels), FEATURES], np.float32), labels
    if kind is tf.data.Dataset:
        data = kind.from_tensor_slices(arrays).batch(2)
    else:
        data = kind(arrays, global_batch_size=2)
    return make_loop(data=data, model=model, **options)


GOOD, BINARY = [0, 4, 2, 1], {"loss_fn": losses.binary_cross_entropy}
TF_DATA, STREAM = {"kind": tf.data.Dataset}, {"kind": Streaming}
ONE_HOT = np.eye(CLASSES, dtype="float32")[GOOD]
FLOATS = np.array([0.5, -1.25, 3.0, 7.0], "float32")

REFUSED = {
    "numbers": (FLOATS, {}, "labels are numbers from -1.25 to 7, and cross_entropy takes .*0 to 4"),
    "numbers of a stream": (FLOATS, TF_DATA, "labels in the first batch are numbers fr"),
    "floats that are no class": (
        np.array([0.0, 9.0]),
        {},
        "label 9.0 of example 1 is out of range",
    ),
    "out of range": ([0, 7, -1, 1], {}, r"label 7 of example 1 .* 0 to 4 \(2 of 4 are .*are -1 to"),
    "from one": ([1, 5, 2, 3], {}, "label 5 of example 1 is out of range: .*they are 1 to 5"),
    "one-hot": (ONE_HOT.astype(int), {}, r"labels of shape \[n, 5\] are one-hot.*tf.argmax"),
    "one-hot stream": (ONE_HOT.astype(int), TF_DATA, r"labels of shape \[n, 5\] are one-hot"),
    "a column": ([[0], [7]], {}, "label 7 of example 1 is out of range"),
    "several labels": ([[0, 1], [1, 2]], {}, r"shape \[n, 2\].*override loss\(\)"),
    "text": (["cat", "dog"], TF_DATA, "labels are strings, .*number the classes"),
    "numbers streamed": (FLOATS, STREAM, "labels in the first batch are numbers fr"),
    "one-hot streamed": (ONE_HOT.astype(int), STREAM, r"labels of shape \[n, 5\] are one-hot"),
    "text streamed": (["cat", "dog"], STREAM, "labels are strings"),
    "binary classes streamed": (
        [3, 3],
        {"model": ending(1, None), **BINARY, **STREAM},
        "labels in the first batch are 3 to 3",
    ),
    "one output": ([0, 1], {"model": ending(1, None)}, "has 1 output, whose softmax is always 1"),
    "one sigmoid": (
        [0, 1],
        {"model": ending(1, "sigmoid"), "loss_fn": "sparse_categorical_crossentropy"},
        "has 1 output, .*for two classes, give --loss=binary_crossentropy, or the model 2 outputs;",
    ),
    "softmax": (GOOD, {"model": ending(5, "softmax")}, r"ends in a softmax \(layer last\).*logits"),
    "sigmoid": ([0, 1], {"model": ending(1, "sigmoid"), **BINARY}, "ends in a sigmoid .*last"),
    "binary classes": ([0, 3], {"model": ending(1, None), **BINARY}, "0 to 3, .*: labels == 3$"),
    "signs": ([1, -1, 1], {"model": ending(1, None), **BINARY}, "-1 to 1, .*: labels == 1$"),
    "of three": ([0, 1, 2], {"model": ending(1, None), **BINARY}, "0 to 2, .*, and give .*cross_e"),
    "no classes": (FLOATS, {"model": ending(1, None), **BINARY}, "for numbers, give .*mean_squ"),
    "no such optimizer": (GOOD, {"optimizer": lambda: "adm"}, "unknown optimizer 'adm': .*'adam'"),
    "clipping": (GOOD, {"optimizer": lambda: keras.optimizers.Nadam(clipnorm=1.0)}, "use TrainSt"),
    "a class": (
        GOOD,
        {"optimizer": lambda: keras.optimizers.Adam},
        "is not an optimizer: give an obj",
    ),
    "no optimizer": (GOOD, {"optimizer": lambda: None}, "None is not an optimizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_in_python(name):
    labels, options, reason = REFUSED[name]
    with pytest.raises(UsageError, match=reason) as error:
        loop_of(labels, **options)
    assert "\n" not in str(error.value) and "user code" not in str(error.value)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "binary_crossentropy"])
def test_one_class_is_nothing_to_learn(loss_fn):
    info = DatasetInfo("photos", class_names=("cat",))
    data = InMemory(
        (np.zeros([4, FEATURES], "float32"), np.zeros(4)), global_batch_size=2, info=info
    )
    with pytest.raises(
        UsageError, match="^photos: all labels are 'cat': there is nothing to learn"
    ):
        make_loop(data=data, model=ending(1, None), loss_fn=loss_fn)
    make_loop(data=data, model=ending(1, None), loss_fn="mse")


def test_what_is_no_mistake():
    """Classes as floats; a loss of one's own; a softmax that is only evaluated; Keras's names."""
    loop_of(np.array(GOOD, "float32"))
    loop_of(np.array(GOOD, "float32"), **TF_DATA)
    loop_of(np.array(GOOD, "float32"), **STREAM)
    loop_of(FLOATS, model=ending(1, "sigmoid"), loss_fn=losses.mean_squared_error)
    loop_of([0.0, 0.5], model=ending(1, None), **BINARY)
    for activation in (None, "sigmoid"):
        loop_of([0, 1], model=ending(1, activation), loss_fn="binary_crossentropy")
    loop_of([0.0, 0.5], model=ending(1, None), **BINARY, **STREAM)
    softmax, data = ending(CLASSES, "softmax")(), np.zeros([4, FEATURES], np.float32)
    data = InMemory((data, np.array(GOOD)), global_batch_size=2, training=False)
    Evaluator(EvalStep(softmax), data)

    class Ordinal(TrainStep):
        def loss(self, batch):
            features, labels = batch
            return super().loss((features, tf.cast(labels >= 1.0, tf.int64)))

    loop_of(FLOATS, step_class=Ordinal)
    for name in ("adam", "AdamW", "SGD", "nadam"):
        made = loop_of(GOOD, optimizer=lambda name=name: name).step.optimizer
        assert type(made).__name__.lower() == name.lower()


CALLS = """
import ctl


class Closed(ctl.TrainStep):
    def __init__(self, model, optimizer, loss_fn):
        super().__init__(model, optimizer, loss_fn)


class Evaluated(ctl.TrainStep):
    class eval_step(ctl.EvalStep):
        def __init__(self, model, loss_fn, metrics):
            super().__init__(model, loss_fn, metrics)


def model(image_shape, num_classes, depth):
    pass


def loss(labels):
    pass


def metrics(classes):
    pass


def fails(labels, outputs):
    return helper(outputs)


def helper(outputs):
    raise ValueError("two\\nlines")
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    (tmp_path / "calls.py").write_text(CALLS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("calls", None)


def test_how_code_is_called_is_checked_before_data_are_read(calls):
    kind = named.step_class("calls:Closed")
    for arguments, reason in (
        ((kind, "dense", "cross_entropy", None), "call the step Closed: .*'metrics'; .*passes the"),
        ((TrainStep, "calls:model", "cross_entropy", None), "calls:model': .*'depth'; it must"),
        ((TrainStep, "dense", "calls:loss", None), "the loss 'calls:loss': .*labels, outputs"),
        ((TrainStep, "dense", "cross_entropy", "calls:metrics"), "calls:metrics': .*'classes'; .*"),
    ):
        with pytest.raises(UsageError, match=reason):
            named.check_calls(*arguments)
    named.check_calls(TrainStep, "dense", "calls:fails", "accuracy")
    kind = named.step_class("calls:Evaluated")
    named.check_calls(kind, "dense", "cross_entropy", None)
    flags = SimpleNamespace(step="calls:Evaluated", loss="cross_entropy", metrics=None)
    flags.weighting = "sum_of_weights"
    made = make_eval_step(flags, mlp())
    assert (type(made), made.weighting) == (kind.eval_step, "sum_of_weights")


def test_an_error_of_the_users_keeps_its_frames_and_no_others(calls):
    loop = loop_of(GOOD, loss_fn=named.find("loss", "calls:fails"))
    with pytest.raises(ValueError) as error:
        loop.train(1)
    # Without the frames of this file, as from the command line.
    error.value.__traceback__ = error.value.__traceback__.tb_next
    text = tracebacks.text_of(tracebacks.of_the_user(error.value))
    frames = [line.strip() for line in text.splitlines() if line.startswith('  File "')]
    assert [line.rsplit(" ", 1)[1] for line in frames] == ["fails", "helper"]
    assert all("calls.py" in line for line in frames)
    assert '    raise ValueError("two\\nlines")\n' in text and "user code" not in text
    assert text.endswith("\nValueError: two\nlines")
    with pytest.raises(TypeError) as bug:
        named.find("loss", None)
    bug.value.__traceback__ = bug.value.__traceback__.tb_next
    assert tracebacks.of_the_user(bug.value) is None


def test_from_the_command_line_it_is_an_unexpected_error(zygote_without_tensorflow, tmp_path):
    (tmp_path / "command.py").write_text(
        "from ctl.flags import parsing\n"
        "def main():\n"
        "    return {}['gone']\n"
        "def run():\n"
        "    parsing.run_command(main, '')\n"
    )
    command = zygote_without_tensorflow.run("command", path=[tmp_path], exit_code=1)
    last = command.stderr.splitlines()
    assert last[0].startswith("Traceback of your code") and last[-1] == "KeyError: 'gone'"
    assert any(line.endswith("line 3, in main") for line in last)
    assert not any("absl" in line or "ctl/flags" in line for line in last)


FILES = {
    "plain.py": "import os as system\nclass A: pass\nif A:\n    def b(): pass\nc, d = 1, 2\n",
    "lazy.py": "def __getattr__(name): return name\n",
    "stars.py": "from os import *\n",
    "broken.py": "def f(:\n",
    "package/__init__.py": "raise SystemExit('it was imported')\n",
    "package/inner.py": "raise SystemExit('it was imported')\ndef f(): pass\n",
}


def test_code_is_looked_for_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = ["A", "b", "c", "d", "system"]
    good = [*(f"plain:{n}" for n in names), "lazy:x", "stars:x", "package.inner:f", "math:cos"]
    good += [f"{tmp_path}/plain.py:A", f"{tmp_path}/package/inner.py:f"]
    for name in [*good, "ctl.recipes.sam:SAM", "keras:Sequential"]:
        early.check_code("step", name)
    for name, reason in (
        ("plain:e", "cannot find the step 'plain:e': plain has no class or function 'e'$"),
        ("plain:AA", "no class or function 'AA'; did you mean 'A'?"),
        ("broken:f", r"cannot import the step 'broken:f': SyntaxError: .*broken.py:1\)$"),
        ("package.gone:f", "No module named 'package.gone'; is its folder on PYTHONPATH"),
        ("gone.inner:f", r"No module named 'gone'; is its folder on PYTHONPATH\?$"),
        ("gone:f", r"is its folder on PYTHONPATH\? Or name its file: FOLDER/gone.py:f$"),
        (f"{tmp_path}/gone.py:f", "there is no file /.*/gone.py$"),
        (f"{tmp_path}/plain.py:AA", "plain has no class or function 'AA'; did you mean 'A'"),
    ):
        with pytest.raises(UsageError, match=reason):
            early.check_code("step", name)
    assert "package" not in sys.modules


EARLY = [
    (["--step=gone:Mine"], "cannot import the step 'gone:Mine': No module named 'gone'"),
    (["--step=mine:Min"], "mine has no class or function 'Min'; did you mean 'Mine'"),
    (["--model=mine:mod"], "mine has no class or function 'mod'; did you mean 'model'"),
    (["--loss=mine:gone"], "cannot find the loss 'mine:gone'"),
    (["--metrics", "mine:gone"], "cannot find the metrics 'mine:gone'"),
    (["--dataset=mine:gone"], "cannot find the dataset 'mine:gone'"),
    (["--dataset=fashin_mnist"], "there is no dataset 'fashin_mnist'; near: fashion_mnist"),
    (["--dataset=fashion_mnist_min/1.0.0"], "there is no .*; near: fashion_mnist_mini"),
    (["--init_from=/nonexistent/no"], "--init_from=/nonexistent/no: no such file or directory"),
    (["--tokenizer=gone.model"], "there is no file gone.model of a tokenizer"),
    (["--record_schema=label:int65"], "--record_schema: label has no type int65; the types are "),
    (
        ["--missing=mean"],
        "--missing has no effect with --dataset=fashion_mnist_mini: it is for your",
    ),
    (["--record_schema=a:int64"], "--record_schema has no effect with --dataset=fashion_mnist_mi"),
    (["--tokenizer=mine.py"], "mine.py is neither a .model of SentencePiece nor a .json of tok"),
    (["--freeze=conv*", "--reinit=head"], "--reinit has no effect without --init_from"),
]


@pytest.mark.parametrize(("given", "expected"), EARLY, ids=lambda v: v[0] if len(v) < 3 else "")
def test_before_tensorflow_is_loaded(zygote_without_tensorflow, tmp_path, given, expected):
    (tmp_path / "mine.py").write_text("class Mine: pass\ndef model(): pass\n")
    run = [TRAIN, f"--model_dir={tmp_path}/run", *given]
    command = zygote_without_tensorflow.run(*run, path=[tmp_path], exit_code=2)
    (line,) = command.stderr.splitlines()
    assert expected.partition(".*")[0] in line and expected.rpartition(".*")[2] in line
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken(zygote_without_tensorflow, tmp_path):
    with socket.socket() as taken, socket.socket() as other:
        for one in (taken, other):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [one.getsockname()[1] for one in (taken, other)]
        workers = "--workers=" + ",".join(f"127.0.0.1:{port}" for port in ports)
        run = [TRAIN, f"--model_dir={tmp_path}", "--strategy=multi_worker", workers]
        command = zygote_without_tensorflow.run(*run, "--worker_index=0", exit_code=5)
        wanted = f"worker 0 cannot listen on 127.0.0.1:{ports[0]}: Address already in use; choose"
        assert command.stderr.splitlines()[-1].startswith(wanted)


def test_datasets_of_tfds_are_known(monkeypatch):
    import tensorflow_datasets as tfds

    early.check_dataset("of_the_users_own", None)  # it may be, since TFDS is imported
    monkeypatch.delitem(sys.modules, "tensorflow_datasets")
    with pytest.raises(UsageError, match="^there is no dataset 'of_the_users_own'"):
        early.check_dataset("of_the_users_own", None)
    ours = {"__tiny"}  # other tests add it
    for name in sorted({*tfds.list_builders(with_community_datasets=False)} - ours)[::60]:
        early.check_dataset(name, None)
    for name in ("mnist", "kmnist:3.*.*", "fashion_mnist_mini/1.0.0", "huggingface:any"):
        early.check_dataset(name, None)


def test_a_folder_that_the_embedded_data_do_not_read(tmp_path):
    """It has an effect where it has a dataset of that name; other datasets are read from it."""
    embedded, photos, prepared = "fashion_mnist_mini", tmp_path / "photos", tmp_path / "prepared"
    (photos / "train" / "cat").mkdir(parents=True)
    (prepared / embedded / "1.0.0").mkdir(parents=True)
    for folder in (photos, prepared):
        with pytest.raises(UsageError, match="has no effect .* comes with ctl: name the dataset"):
            early.check_data_dir(embedded, str(folder))
    (photos / "train" / "cat" / "1.JPG").touch()
    with pytest.raises(UsageError, match=f"to train on its images, give --dataset={photos}: "):
        early.check_data_dir(embedded, str(photos))
    (prepared / embedded / "1.0.0" / "dataset_info.json").touch()
    early.check_data_dir(embedded, str(prepared))
    early.check_data_dir("mnist", str(photos))
