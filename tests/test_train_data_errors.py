"""Trainings whose data are not there, or go bad while they are read."""

from __future__ import annotations

import re
import time

import pytest
from tiny_tfds import CtlTinyColor, prepare, rewrite
from zygote import last_line

pytestmark = pytest.mark.slow  # starts processes

TRAIN = "ctl.train"


def test_data_and_flags_that_do_not_fit(zygote, tmp_path):
    run = [TRAIN, f"--model_dir={tmp_path}/run"]
    missing = [f"--data_dir={tmp_path}", "--dataset=mnist", "--nodownload"]
    command = zygote.run(*run, *missing, exit_code=2)
    assert last_line(command).startswith(f"mnist/3.0.1 is not prepared at {tmp_path}/mnist/3.0.1")
    command = zygote.run(*run, "--global_batch_size=20000", exit_code=2)
    assert "20000 is larger than the dataset" in last_line(command)
    for option in ("--model=tiny_transformer", "--accumulate_steps=2", "--jit_compile=on"):
        command = zygote.run(
            *run, "--strategy=central_storage", "--replicas=2", option, exit_code=2
        )
        assert last_line(command).endswith("use mirrored")
    assert not (tmp_path / "run" / "config.json").exists()


def test_no_network(zygote, tmp_path):
    # A proxy that nobody answers for stands for the missing network, wherever this runs.
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    started = time.monotonic()
    command = zygote.run(
        *(TRAIN, f"--model_dir={tmp_path}/run", f"--data_dir={tmp_path}", "--dataset=mnist"),
        exit_code=2,
        **dead,
        no_proxy="",
    )
    assert re.search(r"mnist/3.0.1 is not prepared .* cannot be reached", last_line(command))
    assert time.monotonic() - started < 60  # TFDS takes minutes


def test_files_that_go_bad_while_they_are_streamed(zygote, tmp_path):
    prepare(CtlTinyColor, str(tmp_path))
    (file,) = (tmp_path / "ctl_tiny_color" / "1.0.0").glob("*-train.tfrecord-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    run = [TRAIN, f"--model_dir={tmp_path}/run", f"--data_dir={tmp_path}", "--model=dense"]
    run += ["--dataset=ctl_tiny_color", "--global_batch_size=10", "--notensorboard"]
    for limit in (0, 1000):
        command = zygote.run(*run, f"--resident_limit_mib={limit}", exit_code=2)
        line = last_line(command)
        named = "ctl_tiny_color/1.0.0.* damaged: ctl_tiny_color-train.tfrecord-00000-of-00001, "
        assert re.search(named + "record 24: corrupted record", line), line
    skip = ["--on_bad_record=skip", "--resident_limit_mib=0", "--train_steps=10", "--noexport"]
    assert "record 24: corrupted record" in zygote.run(*run, *skip).stderr


def test_records_that_are_wrong_while_they_are_streamed(zygote, tmp_path):
    """Also with XLA, which makes a loss of NaN of a label that is no class."""
    prepare(CtlTinyColor, str(tmp_path))
    (file,) = (tmp_path / "ctl_tiny_color" / "1.0.0").glob("*-train.tfrecord-*")
    intact = file.read_bytes()

    def no_class(example):
        example.features.feature["label"].int64_list.value[0] = 99

    def no_image(example):
        png = example.features.feature["image"].bytes_list.value
        png[0] = b"x" * len(png[0])

    run = [TRAIN, f"--model_dir={tmp_path}/run", f"--data_dir={tmp_path}", "--model=dense"]
    run += ["--dataset=ctl_tiny_color", "--global_batch_size=10", "--notensorboard"]
    said = {
        no_class: "label 99 .*is out of range: .*0 to 4",
        no_image: "ctl_tiny_color.*(cannot be decoded|are damaged)",
    }
    for wrong, what in said.items():
        file.write_bytes(intact)
        rewrite(file, wrong)
        for options in (["--resident_limit_mib=0", "--jit_compile=on"], ["--jit_compile=off"]):
            line = last_line(zygote.run(*run, *options, exit_code=2))
            assert re.search(what, line), line
