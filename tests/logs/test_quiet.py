"""What TensorFlow says of itself is not seen in a program that imports ctl; errors are."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile

import pytest
from paths import ROOT

from ctl.logs import quiet, streams

PROGRAM = """
import ctl
import keras, os, sys, logging
import tensorflow as tf
print("kept", file=sys.stderr)
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
data = tf.data.Dataset.from_tensor_slices((tf.ones([8, 4]), tf.zeros([8], tf.int64))).batch(4)
loop = ctl.Loop(ctl.TrainStep(model, "sgd", jit_update=False), data)
loop.train(until=2)
tf.transpose(tf.constant([[1, 2]], tf.int64))
logging.getLogger("tensorflow").warning("AutoGraph could not transform %s", "f")
logging.getLogger("tensorflow").warning("5 out of the last 5 calls")
"""


def errors_of(program: str) -> list[str]:
    silenced = ("TF_CPP_MIN_LOG_LEVEL", "AUTOGRAPH_VERBOSITY")
    kept = {name: value for name, value in os.environ.items() if name not in silenced}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


def test_a_program_is_quiet():
    seen = errors_of(PROGRAM)
    assert seen[0] == "kept"
    # Twice if absl has given the root logger a handler, beside that of TensorFlow.
    said = {line.partition("] ")[2] or line for line in seen[1:]}
    assert said == {"WARNING:tensorflow:5 out of the last 5 calls"}


@pytest.fixture
def no_level(monkeypatch):
    monkeypatch.delenv(quiet.LEVEL)


NOTICE = b"I0000 00:00:1795407310.06 1 port.cc:153] oneDNN custom operations are on\n"


def test_a_user_who_has_set_a_level_sees_all(capfd, monkeypatch):
    monkeypatch.setenv(quiet.LEVEL, "0")
    quiet.set_level()
    with quiet.notices_filtered():
        os.write(2, NOTICE)
    assert os.environ[quiet.LEVEL] == "0"
    assert capfd.readouterr().err == NOTICE.decode()


def test_only_notices_are_filtered(capfd, no_level):
    with quiet.notices_filtered():
        os.write(2, NOTICE)
        os.write(2, b"E0000 00:00:1795407320.57 1 util.cc:131] oneDNN supports DT_INT64 only\n")
        os.write(2, b"E0000 00:00:1795407320.58 1 cuda.cc:52] failed call to cuInit: X (303)\n")
        os.write(2, b"E0000 00:00:1795407320.59 1 cuda.cc:52] failed call to cuInit: X (100)\n")
        os.write(2, b"F0000 00:00:1795407320.60 1 x.cc:1] Check failed\nTraceback")
    lines = capfd.readouterr().err.splitlines()
    assert [line[:5] for line in lines] == ["E0000", "F0000", "Trace"]
    assert "(100)" in lines[0]


def test_an_error_is_shown_when_it_ends_the_context(capfd, no_level):
    try:
        with quiet.notices_filtered():
            os.write(2, b"what went wrong\n")
            raise ImportError
    except ImportError:
        pass
    assert capfd.readouterr().err == "what went wrong\n"


def test_no_directory_for_temporary_files_is_needed(capfd, no_level, monkeypatch):
    with monkeypatch.context() as patched:  # pytest needs one
        patched.setattr(tempfile, "tempdir", "/nowhere")
        with quiet.notices_filtered():
            os.write(2, NOTICE + b"kept\n")
        with pytest.raises(ValueError), streams.native_stderr_held():
            os.write(2, b"held\n")
            raise ValueError
    assert capfd.readouterr().err == "kept\nheld\n"


def test_warnings_of_autograph_only():
    record = logging.makeLogRecord({"msg": "AutoGraph could not transform %s and will run"})
    assert not quiet._is_no_notice(record)
    assert quiet._is_no_notice(logging.makeLogRecord({"msg": "autograph: an error"}))
