"""Signs what the tasks of a job tell each other, so that strangers cannot speak for them.

The key is the environment variable ``CTL_JOB_SECRET``, the same for all tasks of a job.
`ctl.launch` chooses one for the processes that it starts. Without it the key is empty, and anyone
who knows the addresses of the job can sign.
"""

from __future__ import annotations

import hmac
import os

VARIABLE = "CTL_JOB_SECRET"


def sign(text: str) -> bytes:
    """Returns ``text`` behind its signature, 32 hexadecimal digits and a space."""
    return f"{_signature(text)} {text}".encode()


def verified(message: bytes) -> str | None:
    """Returns the text of a message, or None if a task of this job has not signed it."""
    try:
        signature, _, text = message.decode().partition(" ")
    except UnicodeDecodeError:
        return None
    valid = hmac.compare_digest(signature.encode(), _signature(text).encode())
    return text if valid else None


def _signature(text: str) -> str:
    key = os.environb.get(VARIABLE.encode(), b"")
    return hmac.digest(key, text.encode(), "sha256").hex()[:32]
