"""config.json: values of any flag come back as they were."""

from __future__ import annotations

import enum
import json

import pytest
from absl import flags

from ctl.errors import UsageError
from ctl.flags import config


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def flag_values(*arguments: str) -> flags.FlagValues:
    """Flags of the kinds that a module of the user's may define."""
    values = flags.FlagValues()
    flags.DEFINE_float("rate", 0.5, "", flag_values=values)
    flags.DEFINE_boolean("fast", False, "", flag_values=values)
    flags.DEFINE_list("widths", ["8"], "", flag_values=values)
    flags.DEFINE_multi_integer("layer", [1], "", flag_values=values)
    flags.DEFINE_enum_class("colour", Colour.RED, Colour, "", flag_values=values)
    flags.DEFINE_string("model_dir", "run", "", flag_values=values)
    flags.DEFINE_string("schedule", "constant", "", flag_values=values)
    flags.DEFINE_string("early_stop", None, "", flag_values=values)
    flags.DEFINE_string("best_mode", None, "", flag_values=values)
    flags.DEFINE_list("change", [], "", flag_values=values)
    flags.DEFINE_boolean("extend", False, "", flag_values=values)
    values(["command", *arguments])
    return values


GIVEN = ["--rate=0.25", "--fast", "--widths=6,5", "--layer=3", "--layer=4", "--colour=blue"]


def test_flags_of_any_kind_are_adopted_and_compared(tmp_path):
    given, names = flag_values(*GIVEN), ["rate", "fast", "widths", "layer", "colour"]
    config.write(tmp_path, names, given, code={"step": "mine:MyStep", "source": "0a"})
    stored = config.read(tmp_path)
    assert '"step": "mine:MyStep"' in (tmp_path / config.FILE).read_text()

    adopted = flag_values("--rate=0.75")
    config.adopt(stored, names, adopted)
    assert (adopted.rate, adopted.fast, adopted.colour) == (0.75, True, Colour.BLUE)
    assert (adopted.widths, adopted.layer) == (["6", "5"], [3, 4])
    adopted.set_default("widths", ["9"])  # as what fits the data does
    assert adopted.widths == ["6", "5"]

    hostile = {"model_dir": ["evil:module"], "rate": [1], "widths": {"a": 1}, "layer": [[1]]}
    for name, value in hostile.items():
        with pytest.raises(UsageError, match=f"--{name} cannot be .*: give that flag"):
            config.adopt({name: value}, [name], flag_values())

    config.check_resumable(stored, flag_values(*GIVEN))
    with pytest.raises(UsageError, match=r"--widths was \[.6., .5.\], is \[.8.\]; .*RED"):
        config.check_resumable(stored, flag_values(*GIVEN[:2], *GIVEN[3:5]))


def test_the_file_tells_each_number_of_workers(tmp_path):
    def write(**facts) -> list[tuple[int, int]]:
        config.write(tmp_path, ["rate"], flag_values(), **facts)
        entries = json.loads((tmp_path / config.FILE).read_text())["workers"]
        return [(entry["step"], entry["count"]) for entry in entries]

    assert write(workers=4) == [(0, 4)]
    assert write(workers=4, step=50) == [(0, 4)]
    assert write(workers=3, step=120) == [(0, 4), (120, 3)]
    hostile = json.loads((tmp_path / config.FILE).read_text()) | {"workers": ["x", {"step": 1}]}
    (tmp_path / config.FILE).write_text(json.dumps(hostile))
    assert write(workers=2, step=130) == [(130, 2)]


def test_a_run_keeps_its_tokenizer_and_takes_no_other(tmp_path):
    def given(path) -> flags.FlagValues:
        values = flag_values()
        flags.DEFINE_string("tokenizer", path and str(path), "", flag_values=values)
        return values

    for name, content in (("mine.model", b"1"), ("same.model", b"1"), ("other.model", b"2")):
        (tmp_path / name).write_bytes(content)
    run = tmp_path / "run"
    run.mkdir()
    config.write(run, ["rate"], given(None))
    config.check_tokenizer(run, given(None))
    with pytest.raises(UsageError, match="a run without a tokenizer: leave out --tokenizer"):
        config.check_tokenizer(run, given(tmp_path / "mine.model"))

    config.write(run, ["rate", "tokenizer"], given(tmp_path / "mine.model"))
    kept = config.kept_tokenizer(run)
    assert kept == run / "tokenizer.model" and kept.read_bytes() == b"1"
    for same in (tmp_path / "same.model", kept):
        config.check_tokenizer(run, given(same))
        config.check_resumable(config.read(run), given(same))
    for other, said in ((tmp_path / "other.model", "has the SHA-256 d4735e3a265e"), (None, "none")):
        with pytest.raises(UsageError, match=f"6b86b273ff34, and .*{said}.* --tokenizer={kept}$"):
            config.check_tokenizer(run, given(other))
    text = (run / config.FILE).read_text().replace('"tokenizer.model"', '"/etc/passwd"')
    (run / config.FILE).write_text(text)
    assert config.kept_tokenizer(run) is None
