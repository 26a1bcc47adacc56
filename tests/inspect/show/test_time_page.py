"""The page of `ctl.inspect time`: one well-formed file, whatever is in the ledger."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET

import pytest

from ctl.errors import UsageError
from ctl.flags.parsing import flags
from ctl.inspect.commands import time_spent
from ctl.inspect.show.pictures import NARROW, WIDE
from ctl.inspect.show.time_page import STARTS, make_page, tables
from ctl.logs.ledger import path_of, read, spent

HOSTILE = "</td><script>alert('1')</script>\"]]>--><svg onload=x>&amp;"


def write(directory, starts: int = 3, worker: int = 0, end: str = "") -> None:
    """Starts that lose their last steps, and pauses between them."""
    draw, at, lines = random.Random(0), 1e9, []
    for number in range(starts):
        began, first, seconds = at, 50 * number, {"start": 0.0}
        for step in range(0, 80, 10):
            at += 10
            for name in ("steps", "input", "evaluation", "saving", "waiting", "other", "compile"):
                seconds[name] = seconds.get(name, 0.0) + draw.uniform(0, 10 / 7)
            record = {"schema": 1, "began": began, "time": at, "workers": 2 + number % 2}
            record |= {"first": first, "step": first + step, "seconds": dict(seconds)}
            lines.append(record | ({"inspected": [4.0, 1.0]} if number % 2 else {}))
        lines[-1]["end"] = end
        at += 25
    path_of(directory, worker).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def command(monkeypatch):
    """Calls the command; ``json`` as the flag says."""

    def call(*arguments, as_json: bool = False) -> None:
        values = flags.FlagValues()
        flags.DEFINE_boolean("json", as_json, "", flag_values=values)
        values([""])
        monkeypatch.setattr(time_spent, "FLAGS", values)
        time_spent.main(list(map(str, arguments)))

    return call


@pytest.mark.parametrize("starts", [1, 3, 100])
def test_the_page_is_well_formed_whatever_is_in_it(tmp_path, starts):
    write(tmp_path, starts, end=HOSTILE)
    write(tmp_path, starts, worker=1)
    page = make_page(HOSTILE, read(tmp_path))
    ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert "<script" not in page and "onload=x>" not in page
    assert not re.search(r"(?:src|href)=|url\((?!#)", page)
    assert len(page) < 400_000 and page.count("<h2>") == 4


def test_columns_are_whole_and_inside_their_picture(tmp_path):
    write(tmp_path)
    page = make_page("run", read(tmp_path))
    pictures = re.findall(r'<svg viewBox="0 0 (\d+) [\d.]+" role="img">(.*?)</svg>', page)
    assert [int(width) for width, _ in pictures] == [WIDE.width, NARROW.width]
    for width, inside in pictures:
        columns: dict[float, float] = {}
        for x, wide, high in re.findall(
            r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="([\d.]+)"', inside
        ):
            assert float(x) + float(wide) <= int(width)
            columns[float(x)] = max(columns.get(float(x), 0.0), float(high))
        assert len(columns) > 30 and all(abs(high - 180) < 1 for high in columns.values())


def test_the_tables_add_up_to_the_whole(tmp_path):
    write(tmp_path)
    write(tmp_path, worker=1)
    made = tables(read(tmp_path))
    header, rows = made["Starts"]
    assert [row[header.index("steps")] for row in rows][0] == "0 to 70" and len(rows) == 3
    assert header[:2] == ["began", "workers"] and header[-1] == "end"
    lost = sum(float(row[header.index("lost to failures")].split()[0]) for row in rows)
    assert lost == pytest.approx(spent(read(tmp_path)[0]).seconds["lost"], abs=0.2) and lost > 1
    assert [row[0] for row in made["Each worker"][1]] == ["0", "1"]
    write(tmp_path, STARTS + 7)
    assert len(tables(read(tmp_path))[f"The last {STARTS} of {STARTS + 7} starts"][1]) == STARTS


def test_the_command_prints_a_table_and_writes_the_page(tmp_path, command, capsys):
    write(tmp_path)
    command(tmp_path)
    said = capsys.readouterr().out
    page = tmp_path / "inspect/time.html"
    assert said.startswith("goodput ") and said.rstrip().endswith(f"page: {page}")
    shares = [float(share) for share in re.findall(r"([\d.]+) %$", said, re.MULTILINE)]
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.6) and shares[-1] == 100
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")


def test_the_command_as_json(tmp_path, command, capsys):
    write(tmp_path)
    command(tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"])
    assert len(found["starts"]) == 3 and not (tmp_path / "inspect").exists()


@pytest.mark.parametrize("arguments", [[], ["one", "two"], ["nothing"]])
def test_the_command_names_what_is_missing(tmp_path, command, arguments):
    with pytest.raises(UsageError):
        command(*(tmp_path / argument for argument in arguments))
