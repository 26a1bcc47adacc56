"""What other tools call the flags: each is answered with flags that there are."""

from __future__ import annotations

import re

import pytest
from zygote import one_line

from ctl.flags import synonyms

TRAIN = "ctl.train"


@pytest.fixture(scope="module")
def flags_of_train(zygote_without_tensorflow):
    text = zygote_without_tensorflow.run(TRAIN, "--help").stdout
    return re.findall(r"^  --(?:\[no\])?(\w+)", text, re.MULTILINE)


def test_every_answer_names_flags_that_there_are(flags_of_train):
    for advice, names in synonyms.SYNONYMS.items():
        for name in names.split():
            found = synonyms.here(name.strip("*") or name, flags_of_train)
            assert found is not None, name
            assert "*" in name or found == advice, f"{name} stands at {found}, too"


def test_no_flag_of_ctl_is_one_of_another_tool(flags_of_train):
    assert not [name for name in flags_of_train if synonyms.here(name, flags_of_train)]
    assert synonyms.here("lr", ["epochs"]) is None


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--lr=0.1", "'lr': ctl calls it --learning_rate"),
        ("--batch-size", "'batch-size': ctl calls it --global_batch_size, the examples per update"),
        ("--gpus=2", "'gpus': ctl calls it --replicas"),
        ("--max_steps=5", "'max_steps': ctl calls it --train_steps"),
        (
            "--validation_split=0.2",
            "ctl calls it --train_split='train[:80%]' --eval_split='train[80%:]', for any share",
        ),
        ("--val_batch_size=5", "--eval_split for the data, --evaluate_every for how often"),
        (
            "--val_check_interval=5",
            "calls it --evaluate_every=500 for steps, --evaluate_every=2ep f",
        ),
        ("--steps_per_epoch=5", "--evaluate_every=STEPS; an epoch is the data once, see --epochs"),
        ("--resume", "--model_dir: the same command with the same directory resumes"),
        ("--fp16", "'fp16': ctl calls it --precision=mixed_float16"),
        ("--num_workers=4", "calls it --workers for the processes of a job; reading data needs no"),
    ],
)
def test_the_answer_is_one_line(zygote_without_tensorflow, given, answer):
    run = zygote_without_tensorflow.run(TRAIN, "--model_dir=run", given, exit_code=2)
    line = one_line(run)
    assert line.startswith("Unknown command line flag ") and answer in line, line
