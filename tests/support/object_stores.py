"""Stores for tests: a server of S3 on this machine, and `memory://`."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pytest


@dataclass(frozen=True)
class S3:
    """A server: the environment with which processes reach it, and what stops it."""

    environment: dict[str, str]
    stop: Callable[[], None]


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """Runs a server of S3 in a thread, with the bucket ``runs``. This process reaches it, too."""
    pytest.importorskip("s3fs")
    threaded = pytest.importorskip("moto.server").ThreadedMotoServer
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    import botocore.session

    server = threaded(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(4),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with mock.patch.dict(os.environ, environment):
            client = botocore.session.Session().create_client("s3")
            client.create_bucket(Bucket="runs")
            client.close()
            yield S3(environment, server.stop)
    finally:
        server.stop()
