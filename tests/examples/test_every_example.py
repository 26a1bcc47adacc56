"""What holds for every example: it is short, says its command, and has no flags."""

from __future__ import annotations

import ast

import pytest
from paths import ROOT

SCRIPTS = sorted(path for path in ROOT.glob("ctl/examples/*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_is_short_and_says_its_command(script):
    text = script.read_text("utf-8")
    assert len(text.splitlines()) <= 80
    docstring = ast.get_docstring(ast.parse(text))
    assert f"    python -m ctl.examples.{script.stem}\n" in docstring
    assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    assert not {"argv", "absl", "argparse"} & set(text.replace(".", " ").split())
