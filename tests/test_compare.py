"""`ctl.compare`: the table, the page, and runs that are damaged, missing or still training."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from ctl.base.svg import text_width
from ctl.compare import tables
from ctl.inspect.show.curves import CURVES, draw, make_page
from ctl.logs.runs import read

COMPARE = "ctl.compare"
EVIL = '<script>alert(1)</script>\u202e&"'


def make_run(directory, rate, *, steps=(100, 200), until=200, name="loss", **flags):
    """Records as `ctl.train` writes them: the loss falls with ``rate``."""
    directory.mkdir(parents=True)
    config = {"schema": 1, "flags": {"learning_rate": rate, "seed": 0, **flags}}
    (directory / "config.json").write_text(json.dumps(config))
    lines = []
    for step in steps:
        both = {"schema": 1, "step": step, "epoch": 0.5, "time": 1e9, name: 1 / (step * rate)}
        train = {"phase": "train", "until": until, "steps_per_second": 10.0, "learning_rate": rate}
        lines += [{**both, **train}, {**both, "phase": "eval", "accuracy": step / 1000}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    return directory


@pytest.fixture
def runs(tmp_path):
    return [
        make_run(tmp_path / "fast", 0.1),
        make_run(tmp_path / "slow", 0.01, steps=(100,), replicas=2, model_dir="/elsewhere"),
    ]


def test_the_table_and_the_json(zygote_without_tensorflow, runs):
    command = zygote_without_tensorflow.run(COMPARE, *map(str, runs), "--json")
    assert command.stderr == ""
    fast, slow = json.loads(command.stdout)["runs"]
    assert fast["flags"] == {"learning_rate": 0.1, "replicas": None}  # no seed, no model_dir
    assert fast["results"]["eval accuracy"] == {"best": 0.2, "step": 200, "last": 0.2}
    assert fast["results"]["eval loss"] == {"best": 0.05, "step": 200, "last": 0.05}
    assert (fast["train_seconds"], fast["replica_seconds"]) == (20.0, 20.0)
    assert (slow["step"], slow["until"], slow["replica_seconds"]) == (100, 200, 20.0)
    command = zygote_without_tensorflow.run(COMPARE, *map(str, runs))
    lines = [line.split("  ") for line in command.stdout.splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert cells["run"] == [str(one) for one in runs]
    assert cells["learning_rate"] == ["0.1", "0.01"] and cells["replicas"] == ["not set", "2"]
    assert cells["best eval accuracy"] == ["0.2000 at 200", "0.1000 at 100"]
    assert cells["steps"] == ["200", "100 of 200"] and cells["train time"] == ["20.0 s", "10.0 s"]


def test_a_flag_that_is_not_set_has_its_default(tmp_path):
    """Unless it has no effect, or has no default."""
    unset = {"schedule": "cosine", "plateau_patience": None, "clip_norm": None}
    one = make_run(tmp_path / "a", 1e-3, **unset)
    config = json.loads((one / "config.json").read_text())
    config["flags"]["learning_rate"] = None
    (one / "config.json").write_text(json.dumps(config))
    set_all = {"schedule": "plateau", "plateau_patience": 3, "clip_norm": 1.0}
    other = make_run(tmp_path / "b", 0.1, **set_all)
    header, rows = tables([read(one), read(other)])["Flags that differ"]
    values = dict(zip(header, rows[0], strict=True))
    assert values["learning_rate"] == "0.001"
    assert values["plateau_patience"] == values["clip_norm"] == "not set"
    same = make_run(tmp_path / "c", 1e-3, **unset)
    assert "Flags that differ" not in tables([read(one), read(same)])


def test_workers_are_replicas(tmp_path):
    """`ctl.launch` tells them their number, by no flag."""
    launched = make_run(tmp_path / "a", 0.1, replicas=None, workers=None)
    config = json.loads((launched / "config.json").read_text())
    counts = [{"step": 0, "time": 1e9, "count": 4}, {"step": 9, "time": 1e9, "count": 2}]
    (launched / "config.json").write_text(json.dumps(config | {"workers": counts}))
    two = make_run(tmp_path / "b", 0.1, replicas=2, workers=None)
    one = make_run(tmp_path / "c", 0.1, replicas=None, workers=None)
    runs = [read(path) for path in (launched, two, one)]
    assert [run.replicas for run in runs] == [2, 2, 1]
    assert "Flags that differ" not in tables(runs[:2])
    header, rows = tables(runs)["Flags that differ"]
    assert header == ["run", "replicas"] and [row[1] for row in rows] == ["2", "2", "not set"]
    config |= {"workers": [{"count": "many"}]}  # not trusted
    (launched / "config.json").write_text(json.dumps(config))
    assert read(launched).replicas == 1


def test_the_page_opens_offline_and_escapes_what_runs_say(zygote_without_tensorflow, tmp_path):
    evil = make_run(tmp_path / "r<b>un", 0.1, name=EVIL, optimizer=EVIL)
    other = make_run(tmp_path / "other", 0.2)
    page = tmp_path / "page.html"
    zygote_without_tensorflow.run(COMPARE, str(evil), str(other), f"--page={page}")
    text = page.read_text()
    root = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    kinds = {element.tag for element in root.iter()}
    assert not kinds & {"script", "b", "img", "link", "iframe", "a"} and "svg" in kinds
    assert "default-src 'none'" in text and "http" not in text.replace("http-equiv", "")
    said = "".join(root.itertext())
    assert "alert(1)" in said and "\u202e" not in said
    curves = [e.get("d") for e in root.iter("path") if "eval" in e.get("class", "")]
    titles = [e.text for e in root.iter("h2")]
    assert titles[:2] == ["Results", "Flags that differ"] and len(titles) == len({*titles})
    assert len(curves) == 2 * 4  # loss, EVIL and accuracy: two runs have the last
    assert all("nan" not in d and "inf" not in d for d in curves)


def test_runs_that_are_damaged_missing_or_still_writing(zygote_without_tensorflow, tmp_path, runs):
    (tmp_path / "empty").mkdir()
    silent = make_run(tmp_path / "silent", 0.3, steps=())
    damaged = make_run(tmp_path / "damaged", 0.4)
    with (damaged / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[1]\n" + b"[" * 10_000 + b'\n{"phase": "eval", "step": -1}\n')
        file.write(b'{"phase": "eval", "step": 300, "loss": "NaN", "accuracy": 1e999}\n')
        file.write(b'{"phase": "eval", "step": 400, "lo')
    (damaged / "config.json").write_text("{")
    given = [tmp_path / "gone", tmp_path / "empty", silent, damaged, runs[0]]
    command = zygote_without_tensorflow.run(COMPARE, *map(str, given), "--json")
    assert command.stderr.splitlines()[:3] == [
        f"{tmp_path}/gone: no such directory",
        f"{tmp_path}/empty holds no run of ctl.train: no config.json",
        f"{tmp_path}/silent has logged nothing yet: metrics.jsonl has no record",
    ]
    assert "config.json is damaged" in command.stderr.splitlines()[3]
    assert command.stderr.endswith(f"{damaged}: 4 damaged lines of metrics.jsonl are left out\n")
    first, second = json.loads(command.stdout)["runs"]
    assert (first["step"], first["results"]["eval loss"]["step"]) == (300, 200)
    assert second["step"] == 200
    for wrong in ([str(tmp_path / "gone")], []):
        command = zygote_without_tensorflow.run(COMPARE, *wrong, exit_code=2)
        assert "no run to compare" in command.stderr or "name the directories" in command.stderr
    (tmp_path / "file").touch()
    where = f"--page={tmp_path}/file/page.html"
    command = zygote_without_tensorflow.run(COMPARE, str(runs[0]), where, exit_code=4)
    assert command.stderr.startswith(f"cannot write {where}: File exists")


def test_values_of_any_size_are_drawn(tmp_path):
    """Also one point, equal values, and more runs than there are colours."""
    found = [read(make_run(tmp_path / str(n), 0.1 + n, steps=(5,))) for n in range(CURVES + 1)]
    ET.fromstring(make_page(found, {}, []).removeprefix("<!DOCTYPE html>\n"))
    huge = make_run(tmp_path / "huge", 1e-300, steps=tuple(range(1, 2000)))
    with (huge / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "eval", "step": 9007199254740991, "loss": -1.7e308}\n')
    page = make_page([read(huge)], {}, [])
    ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert len(page) < 100_000


def test_results_come_first_then_flags_as_one_gives_them_and_each_title_once(tmp_path):
    one = make_run(tmp_path / "one", 0.1, steps=(5,), augment=["crop:4", "flip"], schedule="cosine")
    other = make_run(tmp_path / "other", 0.2, steps=(5,))
    runs = [read(one), read(other)]
    made = tables(runs)
    assert list(made) == ["Results", "Flags that differ"]
    names, (first, second) = made["Flags that differ"]
    assert names == ["run", "learning_rate", "augment", "schedule"]
    assert first[1:] == ["0.1", "crop:4,flip", "cosine"] and second[2:] == ["not set", "not set"]
    root = ET.fromstring(make_page(runs, made, []).removeprefix("<!DOCTYPE html>\n"))
    said = [text.strip() for text in root.itertext() if text.strip() == "learning_rate"]
    assert len(said) == 2  # a column, and the title of a chart


def test_a_series_of_one_point_is_a_mark_and_a_chart_without_points_is_not_drawn(tmp_path):
    found = [read(make_run(tmp_path / "one", 0.1, steps=(5,)))]
    root = ET.fromstring(draw(found, "learning_rate"))
    kinds = [e.get("class") for e in root.iter("path")]
    assert kinds == ["curve mark train c0"]
    assert draw(found, "nothing") == ""


def test_nothing_is_wider_than_the_page(tmp_path):
    """Charts scale with the page; tables have few columns, and are lists on narrow screens."""
    metrics = {f"an_error_of_mine_{n}": n for n in range(9)}
    path = make_run(tmp_path / "one", 0.1, until=2**40)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"phase": "eval", "step": 2**40, "loss": 1.0, **metrics}) + "\n")
    runs = [read(path)]
    root = ET.fromstring(make_page(runs, tables(runs), []).removeprefix("<!DOCTYPE html>\n"))
    assert all(len(list(row)) <= 8 for row in root.iter("tr"))
    cells = [cell.get("data-name") for cell in root.iter("td")]
    assert all(cells) and "best eval an_error_of_mine_8" in cells
    for picture in root.iter("svg"):
        assert picture.get("width") is None
        width = float(picture.get("viewBox").split()[2])
        for text in picture.iter("text"):
            half = text_width(text.text) / 2 if text.get("class") == "x" else 0
            assert float(text.get("x")) + half <= width
