"""Shared pieces of the data tests: a real S3 server on loopback, and the folder of shared data sets."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = Path(os.environ.get("KME_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "iris.npz").exists():
        pytest.skip("the shared data sets are not here; set KME_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def s3_server():
    """The address of an S3 server that runs in this process."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch) -> str:
    """A fresh bucket as s3:// address, with the environment that reaches it."""
    import urllib.request

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "KME_STORE_RETRIES": "2",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(f"{s3_server}/{name}", method="PUT")
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200
    return f"s3://{name}"
