from __future__ import annotations

import pytest


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    """The warnings that absl logged."""
    from absl import logging

    monkeypatch.setattr(logging.get_absl_logger(), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
