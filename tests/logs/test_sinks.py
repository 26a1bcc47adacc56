"""Files of log records, whole after kills and full disks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import tensorflow as tf
from records import points, record
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from ctl.errors import CtlError
from ctl.logs.sinks import JsonLines, TensorBoard, _of, scalar_messages


def lines(path):
    """As a strict reader would: NaN is no JSON."""

    def refuse(constant):
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_lines_hold_records_and_a_schema_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(record(loss=0.5))
    assert lines(path) == [{"schema": 1, **record(loss=0.5)}]  # before it is closed
    sink.close()
    sink = JsonLines(path)
    sink.write(record(2, loss=0.25))
    sink.close()
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_json_lines_keep_numbers_that_are_not_finite(tmp_path):
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.write(record(a=float("nan"), b=float("inf"), c=-float("inf")))
    (line,) = lines(tmp_path / "m.jsonl")
    assert (line["a"], line["b"], line["c"]) == ("NaN", "Infinity", "-Infinity")
    assert float(line["c"]) == -float("inf")


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3}', "\0\0\0", '{"step": "\xe9'])
def test_json_lines_repair_a_torn_last_line(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn.encode("latin-1"))
    sink = JsonLines(path)
    sink.write(record(9))
    sink.close()
    steps = [line["step"] for line in lines(path)]
    assert steps == ([1, 2, 3, 9] if torn.endswith("}") else [1, 2, 9])


def test_json_lines_survive_kill_9(tmp_path):
    path = tmp_path / "m.jsonl"
    if (pid := os.fork()) == 0:
        try:
            JsonLines(path).write(record(7))
            os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 9
    assert [line["step"] for line in lines(path)] == [7]


@pytest.mark.parametrize(("after", "kept"), [(None, [1, 2, 0, 3, 4]), (2, [1, 2, 0]), (-1, [])])
def test_json_lines_of_an_attempt_that_was_given_up_are_moved(tmp_path, after, kept):
    """0 stands for a damaged line. Twice, because a second attempt may be given up, too."""
    path, old = tmp_path / "m.jsonl", tmp_path / "m.jsonl.old"
    given_up = []
    for attempt in range(2):
        path.write_text("".join(f'{{"step": {n}, "a": {attempt}}}\n' for n in (1, 2)))
        with path.open("a") as file:
            file.write('[1e999]\n{"step": 3, "loss": 0.5}\n{"step": 4}\n')
        before = path.read_text().splitlines()
        sink = JsonLines(path, after)
        assert [_of(line)[0] for line in path.read_bytes().splitlines()] == kept
        given_up += before[len(kept) :]
        sink.write(record(9))
        sink.close()
        assert lines(path)[-1]["step"] == 9
    assert (old.read_text().splitlines() if old.exists() else []) == given_up


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_an_evaluation_whose_checkpoint_does_not_have_it_is_moved(tmp_path):
    """A run that is killed between the two evaluates again."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for phase, step in (("train", 10), ("eval", 10), ("train", 20), ("eval", 20)):
        sink.write({"phase": phase, "step": step})
    sink.close()
    JsonLines(path, 20).close()
    assert path.read_text().count("\n") == 4
    JsonLines(path, 20, evaluates=True).close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["phase"], r["step"]) for r in found] == [("train", 10), ("eval", 10), ("train", 20)]
    assert json.loads(Path(f"{path}.old").read_text())["phase"] == "eval"


def test_json_lines_on_a_full_disk(tmp_path):
    sink = JsonLines(tmp_path / "m.jsonl")
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), sink._file.fileno())
    with pytest.raises(CtlError, match="cannot write .*m.jsonl: No space left on device"):
        sink.write(record(loss=0.5))
    sink.close()


def test_json_lines_where_no_file_can_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CtlError, match="cannot write .*m.jsonl: "):
        JsonLines(tmp_path / "file" / "m.jsonl")


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.old"])
@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_json_lines_where_something_else_is(tmp_path, name, kind):
    """A pipe would block for ever; a link leads elsewhere."""
    path, elsewhere = tmp_path / name, tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    make = {"pipe": os.mkfifo, "link": lambda p: p.symlink_to(elsewhere), "directory": Path.mkdir}
    make[kind](path)
    with pytest.raises(CtlError, match=f"cannot write {path}: it is not a file of the run; move"):
        JsonLines(tmp_path / "m.jsonl", after=-1)
    assert elsewhere.read_text() == "kept"


def test_tensorboard_does_not_follow_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CtlError, match="cannot write .*train: it is not a directory of the run"):
        TensorBoard(tmp_path).write(record(loss=0.5))
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_tensorboard_has_scalars_of_both_phases_at_once(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.write(record(5, loss=0.5, learning_rate=0.25))
    sink.write(record(6, loss=0.25, learning_rate=0.125))
    sink.write(record(6, "eval", loss=2.0))
    # Before it is closed: what was written is what a killed run leaves.
    assert points(tmp_path / "train") == {
        "loss": [(5, 0.5), (6, 0.25)],
        "learning_rate": [(5, 0.25), (6, 0.125)],
    }
    assert points(tmp_path / "eval") == {"loss": [(6, 2.0)]}
    sink.close()


def test_scalars_are_the_messages_of_tensorboard():
    values = {"loss": 0.3, "big": 1e30, "none": float("nan"), "count": 3}
    ours = tf.compat.v1.Summary(value=scalar_messages(values))
    assert str(ours) == "".join(str(scalar_pb(name, value)) for name, value in values.items())


def test_tensorboard_where_no_file_can_be(tmp_path):
    (tmp_path / "train").touch()
    with pytest.raises(CtlError, match=f"cannot write events to {tmp_path}/train: ") as raised:
        TensorBoard(tmp_path).write(record(loss=0.5))
    assert "\n" not in str(raised.value)


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", text)[1])


def test_records_for_tensorboard_hold_no_memory(tmp_path):
    sink = TensorBoard(tmp_path)

    def write(steps):
        for step in steps:
            sink.write(record(step, **{f"x{k}": step + k / 7 for k in range(8)}))

    write(range(100))  # buffers
    before = anonymous_bytes()
    write(range(100, 500))
    assert anonymous_bytes() - before < 1 << 19  # 400 records of 1 KiB and more each
    sink.close()
