"""Command lines: what is wrong with one is said in one line before TensorFlow is loaded; --help."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from zygote import one_line

from ctl.base import names
from ctl.flags import durations
from ctl.flags.defaults import spelled_out
from ctl.jobs.build import make_optimizer

TRAIN, EVALUATE = "ctl.train", "ctl.evaluate"


def flags_only(value) -> str:
    """The id of a test: its flags, without what they are expected to say."""
    return " ".join(value)[:40] if isinstance(value, tuple | list) else ""


TWO = ("--workers=a:1,b:2", "--worker_index=0")
WRONG = [
    ((), "--model_dir is required"),
    (
        ("--strategy=multi_worker", *TWO, "--collective_timeout=nan"),
        "--collective_timeout=nan must be a finite number",
    ),
    (("--resident_limit_mib=1e999",), "--resident_limit_mib=inf must be a finite number"),
    (("--log_every=1e999",), "'1e999' is not a duration"),
    (("--warmup=1e999ep",), "'1e999ep' is not a duration"),
    (("--model_dir=nothing://run",), "fsspec knows no nothing://"),
    (("--model_dir=/dev/null/run",), "/dev/null is a file, not a directory"),
    (("--model_dir=" + "x" * 300,), "File name too long"),
    (("--modle=dense",), "Unknown command line flag 'modle'. Did you mean: model"),
    (("--model=convnte",), "unknown model 'convnte': did you mean 'convnet'"),
    (("--optimizer=RMSpop",), "unknown optimizer 'rmspop': did you mean 'rmsprop'"),
    (
        ("--optimizer=MultiOptimizer",),
        "optimizer multioptimizer is not supported: .*groups",
    ),
    (("train",), "unexpected argument 'train'"),
    (("--replicas=3",), "--global_batch_size=64 is not divisible by --replicas=3; 66 is"),
    (("--accumulate_steps=65",), "--accumulate_steps=65, but a replica has 64 examples: use 64 or"),
    (
        ("--accumulate_steps=33", "--replicas=2"),
        "=33, but a replica has 32 examples: use 32 or less",
    ),
    (("--replicas=0",), "--replicas=0: 0 is not a positive integer"),
    (("--learning_rate=-0.1",), "--learning_rate must be a number of at least 0, got -0.1"),
    (("--learning_rate=nan",), "--learning_rate must be a number of at least 0, got nan"),
    (("--learning_rate=fast",), "--learning_rate=fast"),
    (("--epochs=2", "--train_steps=5"), "--epochs and --train_steps say the same thing"),
    (("--epochs=0",), "--epochs=0.0 must be a number above 0"),
    (("--epochs=inf",), "--epochs=inf must be a number above 0"),
    (("--train_steps=0",), "--train_steps=0"),
    (("--seed=4294967296",), "--seed=4294967296"),
    (("--tpu=local",), "--tpu has no effect without --strategy=tpu"),
    (("--strategy=tpu",), "--strategy=tpu needs --tpu=NAME"),
    (("--strategy=one_device", "--replicas=2"), "one_device has one replica, not 2: use mirrored"),
    (("--strategy=default", "--replicas=2"), "default has one replica, not 2: use mirrored"),
    (("--strategy=best",), "--strategy=best"),
    (("--strategy=mirored",), "unknown --strategy 'mirored': did you mean 'mirrored'"),
    (("--schedule=cosin",), "unknown --schedule 'cosin': did you mean 'cosine'"),
    (("--precompile", "--noxla_cache"), "--precompile needs --xla_cache"),
    (("--eager", "--strategy=multi_worker", *TWO), "--eager works in one process: debug with"),
    (("--eager", "--inspect_every=9"), "--inspect_every needs the graph of the step: leave out"),
    (("--eager", "--jit_compile=auto"), "--jit_compile=auto tries graphs: leave out --eager"),
    (
        ("--dry_run", "--strategy=multi_worker", *TWO),
        "--dry_run works in one process: leave out --strategy=multi_worker, --workers, --worker_i",
    ),
    (("--image_shape=28x28",), "--image_shape=28x28 is not HEIGHT,WIDTH,CHANNELS"),
    (("--image_shape=28,28,²",), "is not HEIGHT,WIDTH,CHANNELS"),
    (("--evaluate_every=often",), "--evaluate_every: 'often' is not a duration"),
    (("--evaluate_every=0",), "--evaluate_every must be above 0"),
    (("--checkpoint_every=0.5",), "--checkpoint_every: steps are whole numbers, got 0.5"),
    (("--log_every=-1",), "--log_every: '-1' is not a duration"),
    (("--check_replicas_every=0",), "--check_replicas_every must be above 0"),
    (("--warmup=2epochs",), "--warmup: '2epochs' is not a duration"),
    (("--clip_norm=0",), "--clip_norm must be a number above 0, not 0.0"),
    (("--ema_decay=1",), "--ema_decay must be a number between 0 and 1, not 1.0"),
    (("--weight_decay=nan",), "--weight_decay must be a number of at least 0, got nan"),
    (("--label_smoothing=2",), "--label_smoothing=2"),
    (("--weighting=mean",), "--weighting=mean"),
    (("--class_weight=:5",), "--class_weight=:5: :5 is not CLASS:WEIGHT, or rep"),
    (("--class_weight=0:1,0:2",), "--class_weight=0:1,0:2: 0:2 is not CLASS:WEIGHT, or rep"),
    (("--class_weight=0:1,1:0",), "--class_weight of class 1 must be a number above 0, not 0.0"),
    (
        ("--class_weight=balance",),
        "balance is not CLASS:WEIGHT, .* write e.g. 0:1,1:5, or balanced",
    ),
    (
        ("--dataset=.", "--class_weight=balanced", "--oversample"),
        "both make classes count alike: give one",
    ),
    (
        ("--oversample",),
        "--oversample has no effect with --dataset=fashion_mnist_mini: leave it out",
    ),
    (("--class_weight=0:few",), "--class_weight of class 0 must be a number above 0, not nan"),
    (("--profile_steps=0:10",), "'0:10' is not a window of steps"),
    (("--best_metric=bleu",), "--best_metric=bleu: add --best_mode=max or --best_mode=min"),
    (("--loss=msee",), "unknown loss 'msee': did you mean 'mse'. .*, or package.module:function"),
    (("--loss=mean_squared_error", "--label_smoothing=0.1"), "--label_smoothing is for --loss=c"),
    (("--log_dir=logs",), "Unknown command line flag 'log_dir': ctl calls it --model_dir"),
    (("--verbose=0",), "Unknown command line flag 'verbose': ctl calls it --log_every$"),
    (("--spoken=0",), "Unknown command line flag 'spoken'$"),
    (("--step=MyStep",), "--step=MyStep is neither package.module:MyStep nor file.py:MyStep, a s"),
    (("--metrics=a:b,accuracy",), "--metrics=a:b,accuracy is not NAME,NAME"),
    (("--early_stop=loss",), "--early_stop=loss is not METRIC:PATIENCE"),
    (
        ("--early_stop=val_loss:3",),
        "--early_stop=val_loss:3: it takes results of evaluations, by their names: write "
        "--early_stop=loss:3",
    ),
    (("--early_stop=bleu:3",), "--early_stop=bleu:3: write bleu:3:max or bleu:3:min, as is best"),
    (
        ("--best_metric=auc", "--best_mode=max", "--early_stop=wer:3"),
        "--early_stop=wer:3: write wer:3:max or wer:3:min, as is best",
    ),
    (("--early_stop=loss:3:max",), "--early_stop=loss:3:max: the best loss is the lowest"),
    (("--best_mode=min",), "--best_mode=min: the best accuracy is the highest: name another res"),
    (("--momentum=0.9",), "--momentum has no effect with --optimizer=adam: use momentum or nes"),
    (("--plateau_patience=3",), "--plateau_patience is for --schedule=plateau, not for cosine"),
    (("--schedule=plateau", "--decay_rate=2"), "--decay_rate=2 of a plateau must be below 1"),
    (
        ("--schedule=plateau", "--end_learning_rate=0.1"),
        "--end_learning_rate=0.1 is above --learning_rate=0.001",
    ),
    (
        ("--num_examples=9",),
        "--num_examples has no effect with --dataset=fashion_mnist_mini: leave",
    ),
    (
        ("--dataset=synthetic", "--on_bad_record=skip"),
        "--on_bad_record has no effect with --dataset=synthetic: leave it out",
    ),
    (
        ("--dataset=synthetic", "--data_dir=photos"),
        "--data_dir has no effect with --dataset=synthetic: leave it out",
    ),
    (
        ("--data_dir=photos",),
        "--data_dir=photos has no effect with --dataset=fashion_mnist_mini, .*: name the dataset",
    ),
    (  # the other dataset is read from there
        ("--data_dir=photos", "--also_evaluate=mnist@test,a@b@c"),
        "--also_evaluate=a@b@c is neither SPLIT nor DATASET@SPLIT",
    ),
    (("--communication=ring",), "--communication has no effect without --strategy=multi_worker"),
    (("--startup_timeout=9",), "--startup_timeout has no effect without --strategy=multi_worke"),
    (("--collective_timeout=9",), "--collective_timeout has no effect without --strategy=multi_"),
    (
        ("--strategy=multi_worker", *TWO, "--worker_timeout=9"),
        "--worker_timeout has no effect without --strategy=parameter_server: leave it out",
    ),
    (
        ("--strategy=multi_worker", *TWO, "--cross_device_ops=ring"),
        "--cross_device_ops has no effect with --strategy=multi_worker",
    ),
    (
        ("--cross_device_ops=hierarchical_copy", "--replicas=3", "--global_batch_size=60"),
        "hierarchical_copy sums an odd number of replicas wrongly, as --replicas=3: use reduction",
    ),
    (("--power=2",), "--power is for --schedule=polynomial, not for cosine"),
    (("--schedule=piecewise",), "--schedule=piecewise needs --rates"),
    (("--schedule=piecewise", "--rates=1,2", "--boundaries=1,2"), "one more rate than boundaries"),
    (("--base_batch_size=64",), "--base_batch_size has no effect without --lr_scaling"),
    (("--precision=float8",), "--precision=float8"),
    (("--flagfile=/nonexistent/no",), "/nonexistent/no"),
    (
        ("--dataset=mnist", "--data_dir=none://bucket/data"),
        "none://bucket/data: fsspec knows no",
    ),
    (("--dataset=mnist", "--data_dir=memory://tfds"), "memory://tfds has no dataset 'mnist': prep"),
    (("--dataset=memory://none.csv",), "memory://none.csv: there is no such file or folder"),
    (("--dataset=memory://", "--data_cache=/tmp/a:20"), "'/tmp/a:20' is not DIRECTORY:SIZE, such"),
    (("--data_cache=/tmp/a:1GiB",), "--data_cache has no effect without a URL as --dataset or --"),
    (("--augment=flip,mixup",), "--augment=mixup: write mixup:ALPHA"),
    (("--table_rows=10",), "--table_rows has no effect with --model=convnet: leave it out"),
    (("--model=dlrm",), "--model=dlrm takes click data, such as --dataset=./train.txt, not fashi"),
]


@pytest.mark.parametrize(("given", "expected"), WRONG, ids=flags_only)
def test_wrong_flags_of_train(zygote_without_tensorflow, tmp_path, given, expected):
    given = [f"--model_dir={tmp_path}", *given] if given else given
    line = one_line(zygote_without_tensorflow.run(TRAIN, *given, exit_code=2))
    assert re.search(expected, line), line
    assert len(line) < 400
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_processes_needs_their_strategy(zygote_without_tensorflow, tmp_path):
    job = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    run, job_text = f"--model_dir={tmp_path}", json.dumps(job)
    ended = zygote_without_tensorflow.run(TRAIN, run, exit_code=2, TF_CONFIG=job_text)
    says = "one of several that ctl.launch has started or TF_CONFIG names: add --strategy=multi_w"
    assert says in one_line(ended)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ("--model=dense",),
            "--model=dense takes no click data, as in .*train.txt.gz: leave it out",
        ),
        (("--table_rows=5,6",), "--table_rows has 2 numbers: give one for all tables, or one for"),
        (("--bottom_units=8,no",), "--bottom_units=8,no: give whole numbers from 1, as 512,256"),
        (("--top_units=0",), "--top_units=0: give whole numbers from 1, as 512,256"),
        (("--features=I1",), "--features and --labels have no effect on click data, as in"),
        (("--image_shape=8,8,3",), "--image_shape has no effect with --dataset=.*: leave it out"),
        (("--oversample",), "--oversample has no effect with --dataset=.*: leave it out"),
        (
            ("--on_bad_record=skip",),
            "--on_bad_record has no effect with --dataset=.*: leave it out",
        ),
    ],
    ids=flags_only,
)
def test_wrong_flags_of_click_data(zygote_without_tensorflow, tmp_path, given, expected):
    (tmp_path / "train.txt.gz").touch()
    run = [TRAIN, f"--model_dir={tmp_path}/run", f"--dataset={tmp_path}/train.txt.gz"]
    line = one_line(zygote_without_tensorflow.run(*run, *given, exit_code=2))
    assert re.search(expected, line), line


def test_model_dirs_that_cannot_be(zygote_without_tensorflow, tmp_path):
    """Told before TensorFlow is loaded."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    for path, reason in (
        (link, "a link to a path that is missing"),
        ("/proc/run", "No such"),
    ):
        ended = zygote_without_tensorflow.run(TRAIN, f"--model_dir={path}", exit_code=2)
        assert re.fullmatch(f"--model_dir={path}: {reason}.*\n", ended.stderr)


@pytest.mark.parametrize("value", ["x" * 10_000, "x " * 5_000], ids=["a word", "words"])
@pytest.mark.parametrize(
    ("flag", "end"),
    [
        ("model", "file.py:function for your own"),
        ("schedule", "inverse_sqrt, plateau"),
        ("step", "a subclass of ctl.TrainStep"),
        ("epochs", "'"),
        ("model_dir", "File name too long"),
    ],
)
def test_a_long_value_is_cut_in_the_middle(zygote_without_tensorflow, flag, end, value):
    run = [TRAIN, "--model_dir=/tmp/run", f"--{flag}={value}"]
    line = one_line(zygote_without_tensorflow.run(*run, exit_code=2))
    assert len(line) <= 2_000 and "…" in line, line
    assert flag in line[:50] and line.endswith(end)


def test_a_tilde_is_the_home_directory(zygote_without_tensorflow, tmp_path):
    file = tmp_path / "file"
    file.touch()
    run = [TRAIN, "--model_dir=~/file/run"]
    line = one_line(zygote_without_tensorflow.run(*run, exit_code=2, HOME=str(tmp_path)))
    assert line == f"--model_dir={file}/run: {file} is a file, not a directory"


def test_model_dirs_that_cannot_be_written(tmp_path):
    # Root may write anywhere but on a file system that is read-only, as /sys or a mount.
    mount = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    inside = [sys.executable, "-m", TRAIN, f"--model_dir={tmp_path}/run"]
    wrap = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if subprocess.run([*wrap, "true"], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    ended = subprocess.run([*wrap, *inside], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"--model_dir={tmp_path}/run: no permission to write in {tmp_path}\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), "give --model_dir=DIR of a run, or --model=FILE.keras"),
        (("--model_dir=/nonexistent/no",), "/nonexistent/no holds no run of ctl.train"),
        (("--model=/nonexistent/dir.keras",), "--model=/nonexistent/dir.keras: no such file"),
        (("--model_dir=/tmp", "--checkpoint=newest"), "newest is not latest, best or a step"),
        (("--model_dir=/tmp", "--checkpoint=²"), "is not latest, best or a step"),
        (
            ("--model_dir=/tmp", "--watch", "--checkpoint=best"),
            "--watch needs --model_dir and --checkpoint=latest",
        ),
        (("--model=/dev/null", "--watch"), "--model=/dev/null: no such file|--watch needs"),
        (("--model_dir=/tmp", "--watch", "--watch_timeout=inf"), "--watch_timeout=inf"),
        (("--model_dir=/tmp", "--model=convnte"), "did you mean 'convnet'"),
        (("--model_dir=/tmp", "--epochs=3"), "Unknown command line flag 'epochs'"),
        (("--model=/etc/passwd", "--checkpoint=3"), "--checkpoint has no effect without --model_d"),
        (("--model=/etc/passwd", "--data_dir=photos"), "--data_dir=photos has no effect with --da"),
    ],
    ids=flags_only,
)
def test_wrong_flags_of_evaluate(zygote_without_tensorflow, given, expected):
    line = one_line(zygote_without_tensorflow.run(EVALUATE, *given, exit_code=2))
    assert re.search(expected, line), line


# The stored configuration.


def stored_run(directory, *, schema=1, checkpoint=True, **values) -> None:
    config = {"schema": schema, "flags": values, "command": [], "versions": {}}
    (directory / "config.json").write_text(json.dumps(config))
    if checkpoint:
        (directory / "checkpoints" / "step-0000000001").mkdir(parents=True)


CONTRADICTIONS = {
    # Not the replicas and the checkpoints to keep; the length, because the cosine depends on it.
    "several": (
        {
            **{"optimizer": "sgd", "clip_norm": None, "schedule": "cosine", "epochs": 3.0},
            **{"replicas": 4, "keep": 7, "rates": None, "no_such_flag_any_more": 1, "seed": 0},
        },
        ["--clip_norm=1"],
        'DIR holds a run with other flags: --optimizer was "sgd", is "adam"; --clip_norm was not '
        "set, is 1.0; --epochs was 3.0, is not set; use the same flags or another --model_dir",
    ),
    "the length may change where the rate does not depend on it": (
        {"schedule": "constant", "epochs": 3.0, "optimizer": "sgd"},
        ["--schedule=constant", "--epochs=4"],
        'DIR holds a run with other flags: --optimizer was "sgd", is "adam"; use the same flags or '
        "another --model_dir",
    ),
    "what follows from another flag is not named": (
        {"schedule": "exponential", "optimizer": "sgd", "decay_rate": None, "weight_decay": None},
        ["--schedule=plateau", "--optimizer=adamw"],
        'DIR holds a run with other flags: --schedule was "exponential", is "plateau"; --optimizer '
        'was "sgd", is "adamw"; use the same flags or another --model_dir',
    ),
    "without momentum there are no variables of it": (
        {"optimizer": "momentum", "momentum": 0.0},
        ["--optimizer=momentum", "--momentum=0.5"],
        "DIR holds a run with other flags: --momentum was 0.0, is 0.5; use the same flags or "
        "another --model_dir",
    ),
    "nor may they end": (
        {"optimizer": "momentum", "momentum": 0.9},
        ["--optimizer=momentum", "--momentum=0", "--change=momentum"],
        "--change=momentum: the checkpoints hold its variables: start a new run in another "
        "--model_dir, with --init_from=DIR to keep the weights",
    ),
    "another momentum may be": (
        {"optimizer": "momentum", "momentum": 0.9},
        ["--optimizer=momentum", "--momentum=0.5"],
        "DIR holds a run with other flags: --momentum was 0.9, is 0.5; use the same flags or "
        "another --model_dir, or add --change=momentum to change from the present step on",
    ),
    "early stopping keeps its direction": (
        {"schedule": "cosine", "epochs": 3.0, "early_stop": "mae:5", "best_mode": "min"},
        ["--epochs=3", "--early_stop=mae:5", "--best_mode=max"],
        "--best_mode: the checkpoints hold the state of early_stop mae (min), not of "
        "early_stop mae (max): use the same --schedule=plateau and --early_stop=METRIC, or leave "
        "both out",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_flags_that_contradict_the_run(zygote_without_tensorflow, tmp_path, name):
    stored, given, expected = CONTRADICTIONS[name]
    stored_run(tmp_path, **stored)
    run = [TRAIN, f"--model_dir={tmp_path}", *given]
    line = one_line(zygote_without_tensorflow.run(*run, exit_code=2))
    assert line.replace(str(tmp_path), "DIR") == expected


# Two schedules, because each refuses options of the other.
SPELLED_OUT = [
    {
        **{"schedule": "exponential", "learning_rate": 1e-3, "decay_rate": 0.95},
        **{"decay_steps": "1ep", "lr_scaling": "linear", "base_batch_size": 256},
        **{"optimizer": "adamw", "weight_decay": 0.004, "train_split": "train"},
        "eval_split": "test",
    },
    {
        **{"schedule": "polynomial", "end_learning_rate": 0.0, "power": 1.0, "epochs": 12.0},
        **{"dataset": "synthetic", "image_shape": "28,28,1", "weight_decay": 0.0},
    },
]


@pytest.mark.parametrize("stored_is_spelled_out", [True, False])
@pytest.mark.parametrize("flags", SPELLED_OUT, ids=["exponential", "polynomial"])
def test_a_default_may_be_spelled_out(
    zygote_without_tensorflow, tmp_path, flags, stored_is_spelled_out
):
    needed = ("schedule", "lr_scaling", "optimizer", "dataset")
    short = {name: value if name in needed else None for name, value in flags.items()}
    stored, given = (flags, short) if stored_is_spelled_out else (short, flags)
    stored_run(tmp_path, **stored, model="dense")
    command = [f"--{name}={value}" for name, value in given.items() if value is not None]
    run = zygote_without_tensorflow.run(TRAIN, f"--model_dir={tmp_path}", *command, exit_code=2)
    differ = one_line(run).partition("other flags: ")[2]
    assert differ == '--model was "dense", is "convnet"; use the same flags or another --model_dir'


def test_defaults_are_what_help_says_and_keras_does(zygote_without_tensorflow):
    unset = dict.fromkeys(["learning_rate", "end_learning_rate", "power", "decay_rate"])
    unset |= dict.fromkeys(["decay_steps", "base_batch_size", "epochs", "train_split"])
    text = zygote_without_tensorflow.run(TRAIN, "--help").stdout
    for name, value in spelled_out(unset).items():
        said = re.search(rf"^  --{name}\n(?s:.*?)\(default:\s([^,)]*)", text, re.MULTILINE)[1]
        assert said == value or float(said) == value
    for name in names.OPTIMIZERS:
        decay = make_optimizer(name, 0.9, None).weight_decay or 0.0
        assert spelled_out({"optimizer": name, "weight_decay": None})["weight_decay"] == decay


def test_help_prints_the_choices_of_a_flag_once(zygote_without_tensorflow):
    text = zygote_without_tensorflow.run(TRAIN, "--help").stdout
    assert "  --on_nan=stop|skip\n        stop: end the run" in text


SAME = ["--optimizer=sgd", "--label_smoothing=0.5"]
CHANGES = [
    (["--epochs=4", "--extend"], "--optimizer was"),
    (["--epochs=4", "--change=epochs", "--optimizer=sgd"], None),
    (["--epochs=4", *SAME], "--epochs was 3.0, is 4.0: the cosine .*: add --extend"),
    (
        ["--epochs=2", "--extend", "--optimizer=sgd"],
        "--extend cannot shorten .* --epochs was 3 and is 2: .*--change=epochs instead",
    ),
    # What a message names is not refused next.
    (["--epochs=2", *SAME], "--epochs was 3.0, is 2.0: the cosine .*: add --change=epochs, or u"),
    (["--epochs=2", "--change=epochs", "--optimizer=sgd"], None),
    (["--early_stop=loss:2", *SAME], '--early_stop was .*"; use the same flags or another .*dir$'),
    (["--schedule=plateau", *SAME], '--schedule was .*"; use the same flags or another .*_dir$'),
    (
        ["--schedule=constant", *SAME],
        "--schedule was .*, or add --change=schedule to change from the present step on$",
    ),
    (["--schedule=constant", "--change=schedule", "--optimizer=sgd"], None),
    (["--clip_norm=1", *SAME], "--clip_norm was not set.*or add --change=clip_norm to"),
    (["--clip_norm=1", "--optimizer=sgd", "--change=clip_norm"], None),
    (["--change=optimizer"], "--change=optimizer: the checkpoints hold its .*--init_from=.*run"),
    (["--seed=1", "--change=--seed"], "--change=seed: where the run is in its data follows from"),
    (["--change=clip_nrm"], "unknown flag in --change 'clip_nrm': did you mean 'clip_norm'"),
    (
        ["--early_stop=loss:2", "--change=early_stop"],
        "=early_stop: the checkpoints hold the state of noth",
    ),
    (
        ["--schedule=plateau", "--change=schedule"],
        "--change=schedule: .*nothing, not of plateau: use",
    ),
    # Labels of yes and no are other data for a loss of classes.
    (
        ["--loss=bce", "--optimizer=sgd"],
        r'--loss was "cross_entropy", is "bce"; use the .* --model_dir$',
    ),
    (
        ["--loss=bce", "--optimizer=sgd", "--change=loss"],
        "--change=loss: the labels become others with it: s",
    ),
    (
        ["--loss=sparse_categorical_crossentropy", "--optimizer=sgd"],
        "or add --change=label_smoothing,loss to change from the present step on$",
    ),
    (["--reinit=logits"], "--reinit has no effect without --init_from"),
    (["--restore_best_weights"], "--restore_best_weights needs the best checkpoint"),
    (["--best_metric=mae", "--best_mode=max", "--optimizer=sgd"], None),
]


@pytest.mark.parametrize(("given", "expected"), CHANGES, ids=flags_only)
def test_what_may_change_on_a_resume(zygote_without_tensorflow, tmp_path, given, expected):
    """What passes is stopped by another mistake, which is said last."""
    run = tmp_path / "run"
    run.mkdir()
    stored = {"schedule": "cosine", "epochs": 3.0, "train_steps": None, "early_stop": None}
    stored_run(
        run,
        **stored,
        clip_norm=None,
        optimizer="sgd",
        seed=0,
        label_smoothing=0.5,
        loss="cross_entropy",
    )
    given = [f"--model_dir={run}", *given, *([] if given[0][:7] == "--epoch" else ["--epochs=3"])]
    given += [] if expected else ["--label_smoothing=0.1"]
    line = one_line(zygote_without_tensorflow.run(TRAIN, *given, exit_code=2))
    assert re.search(expected or "other flags: --label_smoothing was 0.5, is 0.1; use", line), line
    assert len(line) < 450


@pytest.mark.parametrize("schedule", durations.SCHEDULES)
def test_a_run_is_extended_under_every_schedule(zygote_without_tensorflow, tmp_path, schedule):
    stored_run(tmp_path, schedule=schedule, epochs=3.0, optimizer="sgd")
    run = [TRAIN, f"--model_dir={tmp_path}", f"--schedule={schedule}", "--epochs=4", "--extend"]
    run += ["--rates=1"] if schedule == "piecewise" else []
    line = one_line(zygote_without_tensorflow.run(*run, exit_code=2))
    assert "--optimizer was" in line and "--epochs" not in line


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "[" * 100_000, '{"schema": 1}', '{"flags": {}, "schema": 7}'),
        '{"flags": [], "schema": 1}',
    ],
    ids=lambda v: v[:30],
)
@pytest.mark.parametrize("module", [TRAIN, EVALUATE])
def test_damaged_config(zygote_without_tensorflow, tmp_path, module, content):
    (tmp_path / "config.json").write_text(content)
    line = one_line(zygote_without_tensorflow.run(module, f"--model_dir={tmp_path}", exit_code=2))
    assert line.startswith(f"{tmp_path}/config.json ") and len(line) < 400


def test_checkpoints_without_a_config_are_not_resumed(zygote_without_tensorflow, tmp_path):
    """Moved away, a damaged one would let the run go on with any flags."""
    stored_run(tmp_path)
    (tmp_path / "config.json").unlink()
    run = [TRAIN, f"--model_dir={tmp_path}", "--learning_rate=7"]
    line = one_line(zygote_without_tensorflow.run(*run, exit_code=2))
    assert line.startswith(f"{tmp_path} holds checkpoints, but not config.json with")


@pytest.mark.parametrize(
    "values",
    [
        {"model": "convnte"},
        {"model": 3},
        {"dataset": ["evil:load"]},
        {"global_batch_size": -1},
        {"global_batch_size": "many"},
        {"precision": "float8"},
        {"image_shape": "$(touch x)"},
        {"seed": -1},
    ],
    ids=str,
)
def test_hostile_config_is_refused(zygote_without_tensorflow, tmp_path, values):
    stored_run(tmp_path, **values)
    run = [EVALUATE, f"--model_dir={tmp_path}"]
    line = one_line(zygote_without_tensorflow.run(*run, exit_code=2))
    assert line.startswith("config.json: ") and len(line) < 400


def test_a_stored_function_is_not_imported(zygote_without_tensorflow, tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    stored_run(tmp_path, model="evil:model")
    command = zygote_without_tensorflow.run(
        EVALUATE, f"--model_dir={tmp_path}", exit_code=2, path=[tmp_path]
    )
    assert one_line(command) == "the run was trained with --model=evil:model: give that flag again"
    stored_run(tmp_path, checkpoint=False, model="evil:model", step="evil:Step", loss="evil:loss")
    command = zygote_without_tensorflow.run(
        EVALUATE, f"--model_dir={tmp_path}", exit_code=2, path=[tmp_path]
    )
    assert one_line(command) == (
        "the run was trained with --step=evil:Step --model=evil:model --loss=evil:loss: give those "
        "flags again"
    )


def test_own_files_are_looked_for_early(zygote_without_tensorflow, tmp_path):
    """A path is one by its form; a name of TFDS is none."""
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "t.csv").write_text("a,b\n1,x\n")
    (tmp_path / "notes.doc").touch()
    run = [TRAIN, f"--model_dir={tmp_path}/run"]
    for given, says in (
        (f"{tmp_path}/photo", f"there is no such file or folder; did you mean {tmp_path}/photos?"),
        ("./none.csv", f"--dataset={Path.cwd()}/none.csv: there is no such file or folder"),
        ("none.npz", f"--dataset={Path.cwd()}/none.npz: there is no such file or folder"),
        (f"{tmp_path}/notes.doc", "is no file that ctl reads: give a file .csv, "),
        ("none://bucket/t.csv", "none://bucket/t.csv: fsspec knows no none://"),
        ("tests", "there is no dataset 'tests' of TFDS: for the files of that name here, give --d"),
    ):
        assert says in one_line(
            zygote_without_tensorflow.run(*run, f"--dataset={given}", exit_code=2)
        )
    for given, says in (
        (("--dataset={}/photos", "--features=a"), "have no effect on images"),
        (("--dataset={}/photos", "--nodownload"), "--download has no effect with --dataset"),
        (("--dataset={}/t.csv", "--image_shape=3,3,3"), "--image_shape has no effect with"),
        (("--dataset={}/t.csv", "--on_bad_record=skip"), "--on_bad_record has no effect with"),
        (
            ("--dataset=mnist", "--also_evaluate={}/t.csv@train"),
            "names files beside --dataset=mnist",
        ),
    ):
        given = [one.format(tmp_path) for one in given]
        assert says in one_line(zygote_without_tensorflow.run(*run, *given, exit_code=2))
