"""README.md is true: its commands parse, its programs run, what it says of Keras can be seen."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.inspect.__main__ import COMMANDS as INSPECT

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN = "/tmp/ctl-run"  # what the README calls a run; here it is another directory

# Of other programs: pip, TensorBoard.
FOREIGN_FLAGS = {"logdir"}


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; of "", those that name none: commands."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def commands() -> list[list[str]]:
    """The commands of ctl in the README: ``[module, flag, ...]``."""
    lines = [line for block in blocks("") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", README)
    found = []
    for line in lines:
        for command in line.split("&&"):
            words = shlex.split(command, comments=True) if "ctl." in command else []
            modules = [word for word in words if re.fullmatch(r"ctl(\.\w+)+", word)]
            if "-m" in words and modules:
                found.append(words[words.index(modules[0]) :])
    return found


@functools.cache
def help_of(*command: str) -> str:
    return python("-m", *command, "--help").stdout


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A short run, with a model to load."""
    directory = tmp_path_factory.mktemp("readme") / "run"
    python("-m", "ctl.train", f"--model_dir={directory}", "--train_steps=20")
    return directory


def test_it_opens_with_the_two_commands():
    first = [line.split("#")[0].split() for line in blocks("")[0].splitlines()]
    assert [line[-1] for line in first] == [f"--model_dir={RUN}", "pytest"]
    assert README.index("```") < 600


PARSE = """
import sys
import importlib
from absl import flags

module = importlib.import_module(sys.argv.pop(1))
module.run_command = lambda main, usage, **_: flags.FLAGS(sys.argv)
module.run()
"""


def test_the_flags_of_every_command_parse(run):
    assert {command[0] for command in commands()} >= {"ctl.train", "ctl.evaluate", "ctl.schedule"}
    for module, *arguments in commands():
        if "--help" in arguments:
            assert help_of(module)
            continue
        if module == "ctl.inspect":
            module = INSPECT[arguments.pop(0)][0]
        module = {"ctl.schedule": "ctl.plot"}.get(module, module)
        here = [a.replace(RUN, str(run)).replace("/shared/run", str(run)) for a in arguments]
        python("-c", PARSE, module, *here)


def test_every_flag_exists():
    exist = set()
    modules = {command[0] for command in commands()} - {"ctl.inspect"}
    for command in [*((m,) for m in modules), *(("ctl.inspect", name) for name in INSPECT)]:
        exist |= set(re.findall(r"^  --(?:\[no\])?(\w+)", help_of(*command), re.MULTILINE))
    named = set(re.findall(r"(?<![\w-])--(\w+)", README)) - FOREIGN_FLAGS - {"help"}
    unknown = {n for n in named if n not in exist and n.removeprefix("no") not in exist}
    assert not unknown
    assert len(named) > 20


def test_a_wrong_flag_would_be_seen():
    with pytest.raises(AssertionError, match="epohs"):
        python("-c", PARSE, "ctl.train", "--model_dir=x", "--epohs=3")


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_programs_run(number, run, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(blocks("python")[number].replace(RUN, str(run)), encoding="utf-8")
    output = python(str(program), cwd=tmp_path).stdout
    assert output.strip(), "a program of the README shows what it does"


def test_what_is_quoted_of_the_code_is_there():
    code = "".join((ROOT / f"ctl/{m}.py").read_text("utf-8") for m in ("loop", "step", "reduce"))
    lines = {line.strip() for line in code.splitlines()}
    quoted = [line.strip() for block in blocks("py") for line in block.splitlines()]
    quoted = [line for line in quoted if line and not line.startswith("#")]
    assert len(quoted) > 5
    assert set(quoted) <= lines


def test_every_picture_and_every_module_is_there():
    links = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", README)
    links += re.findall(r'src="([^"]+)"', README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
    for path in [*(ROOT / "ctl").glob("[!_]*.py"), *(ROOT / "ctl/inspect").glob("[!_]*.py")]:
        name = path.relative_to(ROOT / "ctl")
        assert f"`{name}`" in README, f"{name} is in no table of README.md"


# What README.md says that Keras does under MirroredStrategy; where it stops, the text must change.


def replica() -> int:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def update(strategy, make_optimizer, gradient_of) -> np.ndarray:
    """The weight, from 0, after one update by Keras, whose gradient differs between replicas."""
    with strategy.scope():
        weight = keras.Variable(np.zeros([1], "float32"))
        optimizer = make_optimizer()
        optimizer.build([weight])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.cast(gradient_of(replica()), tf.float32)]))

    step()
    return weight.numpy()


def test_keras_clips_before_it_reduces(mirrored):
    def ten_and_two(replica):
        return [tf.where(tf.equal(replica, 0), 10.0, 2.0)]

    moved = update(mirrored(2), lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0), ten_and_two)
    np.testing.assert_allclose(moved, [-2.0])  # the sum 12, clipped, would move it by 1


def test_keras_cannot_accumulate_gradients(mirrored):
    with pytest.raises(RuntimeError, match="merge_call"):
        update(
            mirrored(2),
            lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
            lambda replica: [1.0],
        )


def test_keras_judges_finiteness_on_one_replica(mirrored):
    weight = update(
        mirrored(2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)),
        lambda replica: [tf.where(tf.equal(replica, 1), np.inf, 1.0)],
    )
    assert np.isinf(weight)  # an update that should have been skipped


def test_keras_draws_one_mask_for_all_replicas(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5)
    run = tf.function(lambda: strategy.run(lambda: dropout(tf.ones([64]), training=True)))
    first, second = strategy.experimental_local_results(run())
    np.testing.assert_array_equal(first, second)


def test_keras_does_not_sum_rows_that_occur_twice():
    rows = tf.IndexedSlices(tf.constant([[1.0], [3.0]]), tf.constant([0, 0]), tf.constant([1, 1]))
    results = []
    for gradient in (rows, tf.convert_to_tensor(rows)):
        weight = keras.Variable(np.zeros([1, 1], "float32"))
        optimizer = keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0)
        optimizer.build([weight])
        optimizer.apply([gradient])
        results.append(weight.numpy().item())
    assert abs(results[0] - results[1]) > 0.1
