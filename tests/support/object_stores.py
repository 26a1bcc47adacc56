"""Stores for tests: a server of S3 on this machine, and `memory://`."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from unittest import mock

import pytest


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Runs a server of S3 in a thread, with the bucket ``runs``. Gives the environment with which
    this process and others reach it; this process has it inside."""
    pytest.importorskip("s3fs")
    threaded = pytest.importorskip("moto.server").ThreadedMotoServer
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
            yield environment
    finally:
        server.stop()
