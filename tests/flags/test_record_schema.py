"""The flag --record_schema: what it takes, and what it says of other text."""

from __future__ import annotations

import pytest

from ctl.errors import UsageError
from ctl.flags.record_schema import Feature, parse_record_schema


def test_types_and_shapes():
    found = parse_record_schema("image:uint8[28,28],a/b c:float32,label:int64,text:string,x:image")
    assert found == {
        "image": Feature("uint8", (28, 28)),
        "a/b c": Feature("float32", ()),
        "label": Feature("int64", ()),
        "text": Feature("string", ()),
        "x": Feature("image", ()),
    }
    assert ",".join(f"{name}:{of}" for name, of in found.items()).startswith("image:uint8[28,28],")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not NAME:TYPE or NAME:TYPE"),
        ("label", "'label' is not NAME:TYPE"),
        ("a:int64,b:int64[", r"'b:int64\[' is not NAME:TYPE"),
        ("a:bytes", "a has no type bytes; the types are image, string, and int8, "),
        ("a:string[3]", r"a has no type string\[3\]; the types"),
        ("a:int64,a:int8", "--record_schema has a twice"),
    ],
)
def test_what_it_does_not_take(text, says):
    with pytest.raises(UsageError, match=says):
        parse_record_schema(text)
