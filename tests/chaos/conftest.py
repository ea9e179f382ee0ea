"""What the tests of faults share: a process that starts the commands, and their results without a fault."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from small_job import FIT, INGEST, LEARN, NIGHTLY, SERVER, Folder


@pytest.fixture(scope="session")
def server():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def folder(tmp_path, server):
    return Folder(tmp_path / "work", server)


@pytest.fixture(scope="session")
def quiet(tmp_path_factory, server):
    """The same commands without a fault."""
    folder = Folder(tmp_path_factory.mktemp("quiet") / "work", server)
    for command in (INGEST, LEARN, FIT, NIGHTLY):
        assert folder.run(*command) == 0, folder.output
    return folder
