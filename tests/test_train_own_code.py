"""The binary with a step, data, a model and flags of the user's own: what it trains, resumes and
evaluates, and what it says of mistakes."""

from __future__ import annotations

import json
import re

import pytest
from runs import config, evaluations
from tokenizer_files import LINES, sentencepiece_model
from zygote import one_line

from ctl import launch

TRAIN, EVALUATE = "ctl.train", "ctl.evaluate"

MINE = """
import keras
import numpy as np
import tensorflow as tf
from absl import flags

import ctl

flags.DEFINE_float("temperature", 1.0, "Divides the loss.")
flags.DEFINE_list("widths", ["8"], "Hidden units.")


class Doubled(ctl.EvalStep):
    def loss(self, batch):
        losses, outputs = super().loss(batch)
        self.log("doubled", 2.0 * losses)
        return 2.0 * losses, outputs


class Mine(ctl.TrainStep):
    eval_step = Doubled

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return losses / flags.FLAGS.temperature, outputs


class Other(Mine):
    pass


def model():
    hidden = [keras.layers.Dense(int(width), "relu") for width in flags.FLAGS.widths]
    return keras.Sequential([keras.Input([4]), *hidden, keras.layers.Dense(1)])


def load(global_batch_size, seed):
    x = np.random.default_rng(seed).normal(size=(200, 4)).astype("float32")
    pairs = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1)))
    batches = pairs.shuffle(200).batch(global_batch_size, drop_remainder=True)
    return batches.repeat(), pairs.batch(30)  # of no known length


def load_once(global_batch_size):
    train, test = load(global_batch_size, 0)
    return train.take(5), test
"""

EARLY = """
import keras

dense = keras.layers.Dense(10)
model = keras.Sequential([keras.Input([28, 28, 1]), keras.layers.Flatten(), dense])
print("drawn:", float(keras.ops.sum(dense.kernel)))
"""

OWN = ["--step=mine:Mine", "--dataset=mine:load", "--model=mine:model"]
FLAGS = ["--loss=mean_squared_error", "--metrics=mse", "--temperature=2", "--widths=6,5"]
TO_THE_END = ["--train_steps=30", "--schedule=constant", "--noexport", "--notensorboard"]
ALL = [*OWN, *FLAGS, *TO_THE_END]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("own")
    (directory / "mine.py").write_text(MINE)
    (directory / "early.py").write_text(EARLY)
    return [directory]


def of_a_file(path) -> list[str]:
    """`ALL` with the file in place of the module."""
    return [flag.replace("=mine:", f"={path[0]}/mine.py:") for flag in ALL]


def variables(model_dir) -> bytes:
    """What the last checkpoint holds."""
    folder = model_dir / "checkpoints/step-0000000030"
    return (folder / "variables.data-00000-of-00001").read_bytes()


@pytest.fixture(scope="module")
def whole(zygote, path, tmp_path_factory):
    """A run on two replicas without a stop; it keeps its best checkpoint by its own metric."""
    model_dir = tmp_path_factory.mktemp("whole")
    best = ["--keep_best=1", "--best_metric=doubled", "--best_mode=min", "--evaluate_every=15"]
    command = zygote.run(TRAIN, f"--model_dir={model_dir}", "--replicas=2", *ALL, *best, path=path)
    return model_dir, command


def test_trains_with_all_of_it(whole):
    model_dir, command = whole
    flags, code = (config(model_dir)[name] for name in ("flags", "code"))
    assert (flags["temperature"], flags["widths"]) == (2.0, ["6", "5"])
    assert code["step"] == "mine:Mine" and len(code["source"]) == 12
    manifest = json.loads((model_dir / "checkpoints/step-0000000030/manifest.json").read_text())
    assert manifest["code"] == {**code, "model": manifest["code"]["model"]}
    assert len(code["modules"]["mine"]) == 12
    assert manifest["code"]["model"]["layer dense"]["activation"] == "relu"
    shapes = [spec["shape"] for spec in manifest["variables"]["model"]]
    assert shapes == [[4, 6], [6], [6, 5], [5], [5, 1], [1]]
    for result in evaluations(model_dir).values():
        assert set(result) == {"schema", "phase", "step", "epoch", "time", "loss", "mse", "doubled"}
        assert result["loss"] == pytest.approx(2 * result["mse"])
        assert result["doubled"] == pytest.approx(result["loss"])
    assert sorted(evaluations(model_dir)) == [15, 30]
    again = "--step=mine:Mine --model=mine:model --dataset=mine:load --checkpoint=best"
    assert f"ctl.evaluate --model_dir={model_dir} {again}" in command.stdout


def test_epochs_count_if_the_data_have_a_length(zygote, path, tmp_path):
    own = [*OWN[:1], "--dataset=mine:load_once", *OWN[2:], *FLAGS, *TO_THE_END[1:]]
    zygote.run(TRAIN, f"--model_dir={tmp_path}", *own, "--epochs=2", path=path)
    assert sorted(evaluations(tmp_path)) == [5, 10]


def test_a_resumed_run_is_the_same_bit_for_bit(zygote, path, whole, tmp_path):
    run = [TRAIN, f"--model_dir={tmp_path}", "--replicas=2"]
    zygote.run(*run, *ALL, "--train_steps=11", path=path)
    others = "--temperature=3", "--step=mine:Other"
    command = zygote.run(*run, *ALL, *others, path=path, exit_code=2)
    assert "with other flags: " in command.stderr and "; use the same flags or" in command.stderr
    assert "--temperature was 2.0, is 3.0; " in command.stderr
    assert '--step was "mine:Mine", is "mine:Other"; ' in command.stderr
    zygote.run(*run, *of_a_file(path))  # the same code
    assert variables(tmp_path) == variables(whole[0])


def test_evaluates_with_what_is_named_again(zygote, path, whole):
    model_dir = whole[0]
    run = [EVALUATE, "--json", f"--model_dir={model_dir}"]
    command = zygote.run(*run, *OWN[1:], path=path, exit_code=2)
    line = "the run was trained with --step=mine:Mine: give that flag again\n"
    assert command.stderr == line
    command = zygote.run(*run, *OWN, "--checkpoint=best", path=path)  # other flags as stored
    found, best = json.loads(command.stdout), min(r["mse"] for r in evaluations(model_dir).values())
    assert found["mse"] == pytest.approx(best, rel=1e-6)
    assert found["loss"] == pytest.approx(2 * best, rel=1e-6)
    assert "the best checkpoint was selected on these data, tf.data," in command.stderr


def test_two_workers(zygote, path, whole, tmp_path):
    addresses = launch.cluster(2)["worker"]
    workers = [
        zygote.start(
            *(TRAIN, f"--model_dir={tmp_path}", "--strategy=multi_worker", *of_a_file(path)),
            TF_CONFIG=json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            ),
        )
        for index in range(2)
    ]
    assert [worker.wait() for worker in workers] == [0, 0], workers[0].stderr[-2000:]
    expected, found = evaluations(whole[0])[30], evaluations(tmp_path)
    assert list(found) == [30]  # the length of an epoch is unknown
    assert found[30]["mse"] == pytest.approx(expected["mse"], rel=1e-4)


WRONG = [
    (["--step=mine:Gone", "--help"], "mine has no class or function 'Gone'"),
    (["--step=mine:model"], "--step=mine:model is not a subclass of ctl.TrainStep"),
    (["--metrics=bogus"], "Keras has no metric 'bogus'"),
    (["--step=mine:Mine", "--temperature=cold"], "--temperature=cold"),
    (["--temperature=2"], "Unknown command line flag 'temperature'"),
    ([*OWN, "--train_split=train"], "--train_split has no effect with --dataset=mine:load"),
    (OWN, "--dataset=mine:load: .* epochs cannot be counted: give --train_steps"),
    ([*OWN[:2], "--train_steps=3"], "the data do not say the shape .* which the model convnet"),
    (["--best_metric=mae", "--best_mode=min"], "unknown --best_metric 'mae': .*loss, accuracy"),
    # An evaluation step of one's own may log what nobody knows before.
    (
        [*ALL, "--best_metric=mae", "--best_mode=min", "--train_steps=2"],
        "unknown --best_metric 'mae': .*loss, mse, doubled",
    ),
    # What runs as the module is imported comes before the devices.
    (
        ["--model=early:model", "--replicas=2"],
        "2 replicas on the CPU need .* make models and tensors in functions",
    ),
    (
        ["--model=early:model", "--precision=mixed_bfloat16"],
        "the model 'early:model' computes in float32, not in mixed_bfloat16: give a function",
    ),
    ([*ALL, "--evaluate_every=1ep"], "--evaluate_every: 1ep counts epochs, and the length"),
]


@pytest.mark.parametrize(
    ("given", "expected"), WRONG, ids=lambda v: " ".join(v)[-40:] if isinstance(v, list) else ""
)
def test_mistakes_are_one_line(zygote, path, tmp_path, given, expected):
    command = zygote.run(TRAIN, f"--model_dir={tmp_path}", *given, path=path, exit_code=2)
    assert re.search(expected, command.stderr.splitlines()[-1])
    assert "Traceback" not in command.stderr


def test_what_a_module_draws_follows_from_the_seed(zygote, path):
    """It is imported before the flags are parsed."""
    drawn = []
    for seed in (["--seed=5"], ["--seed", "5"], ["--seed=6"], [], ["--seed=0"]):
        text = zygote.run(TRAIN, "--help", "--model=early:model", *seed, path=path).stdout
        drawn.append(re.findall(r"^drawn: .*", text, re.MULTILINE))
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3] == drawn[4] != drawn[2]
    assert len(drawn[0]) == 1


def test_the_plan_takes_the_same_flags(zygote, path):
    command = zygote.run("ctl.inspect.commands.plan", *ALL, "--replicas=2", "--json", path=path)
    (collective,) = json.loads(command.stdout)["collectives"]
    assert collective["bytes"] == 4 * (4 * 6 + 6 + 6 * 5 + 5 + 5 + 1)


def test_help_lists_the_flags_of_the_module(zygote, path):
    text = zygote.run(TRAIN, "--help", "--step=mine:Mine", path=path).stdout
    assert text.endswith(
        "\nYour module mine:\n  --temperature\n        Divides the loss. (default: 1.0)\n"
        "  --widths\n        Hidden units. (default: ['8'])\n"
    )


GPT = [
    f"--{flag}=ctl.recipes.gpt:{name}"
    for flag, name in (("step", "LanguageModel"), ("dataset", "datasets"), ("model", "make_model"))
]


def test_a_tokenizer_goes_with_the_run(zygote, tmp_path):
    given = sentencepiece_model(tmp_path / "given.model")
    other = sentencepiece_model(tmp_path / "other.model", size=25)
    (tmp_path / "t.txt").write_text("\n".join(LINES))
    text = f"--data_dir={tmp_path}/t.txt"
    sizes = ["--context=8", "--width=32", "--blocks=1", "--global_batch_size=8"]
    run = [TRAIN, f"--model_dir={tmp_path}/run", *GPT, *sizes, text, *TO_THE_END[1:2]]
    zygote.run(*run, f"--tokenizer={given}", "--train_steps=2")
    kept, exported = (tmp_path / "run" / name for name in ("", "export/assets"))
    for folder in (kept, exported):
        assert (folder / "tokenizer.model").read_bytes() == given.read_bytes()
    shapes = json.loads(
        (tmp_path / "run/checkpoints/step-0000000002/manifest.json").read_text("utf-8")
    )["variables"]["model"]
    assert shapes[0]["shape"] == [31, 32]  # tokens, with that of padding

    command = zygote.run(*run, f"--tokenizer={other}", "--train_steps=3", exit_code=2)
    assert f"give the copy that it keeps, --tokenizer={tmp_path}/run/tokenizer.model" in one_line(
        command
    )
    given.unlink()
    evaluate = [EVALUATE, "--json", f"--model_dir={tmp_path}/run", *GPT]
    found = json.loads(zygote.run(*evaluate).stdout)
    assert found["loss"] == pytest.approx(evaluations(tmp_path / "run")[2]["loss"], rel=1e-6)
    zygote.run(*evaluate, f"--tokenizer={other}", exit_code=2)
    zygote.run(*run, f"--tokenizer={tmp_path}/run/tokenizer.model", "--train_steps=3", "--noexport")


def test_a_tokenizer_without_effect(zygote, path, tmp_path):
    tokenizer = f"--tokenizer={sentencepiece_model(tmp_path / 't.model')}"
    for own, said in (
        (ALL, "--dataset=mine:load: give the function a parameter tokenizer"),
        ([], "--dataset=fashion_mnist_mini: give the text to a function, such as --dataset="),
    ):
        command = zygote.run(
            TRAIN, f"--model_dir={tmp_path}/run", *own, tokenizer, path=path, exit_code=2
        )
        assert f"--tokenizer has no effect with {said}" in command.stderr.splitlines()[-1]
    (tmp_path / "t.txt").write_text("text")
    command = zygote.run(
        TRAIN, f"--model_dir={tmp_path}/run", f"--dataset={tmp_path}/t.txt", exit_code=2
    )
    assert "is text: for a language model of it, give --dataset=ctl.rec" in one_line(command)
