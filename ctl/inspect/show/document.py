"""An HTML page of one file, which opens offline and can run no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence


def document(
    title: str, style: str, body: Sequence[str], before: str = "", images: bool = False
) -> str:
    """A page as HTML, which is also well-formed XML.

    Args:
        title: of the page, escaped.
        style: the style sheet. The content security policy of the page allows it and nothing else.
        body: elements, whose text is escaped.
        before: an element before them.
        images: whether there are images, as data in the page.
    """
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    policy += "; img-src data:" if images else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{title}</title><style>{style}</style></head>\n<body>{before}<main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )
