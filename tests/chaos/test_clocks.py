"""A clock that jumps between a kill and the next start: the job resumes as if nothing had happened."""

from __future__ import annotations

import shutil
import signal

import pytest
from small_job import NIGHTLY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("faketime") is None, reason="needs faketime (Debian: apt-get install faketime)"),
]


@pytest.mark.chaos(16)
@pytest.mark.parametrize("jump", ["+3h", "-3h", "+400d"])
def test_a_killed_job_resumes_under_another_clock(folder, quiet, jump):
    folder.take_over(quiet, "model")
    assert folder.run(*NIGHTLY, faults="predict.after_chunk@3:kill") == -signal.SIGKILL, folder.output
    process = folder.start(*NIGHTLY, prefix=("faketime", "-f", jump), FAKETIME_DONT_FAKE_MONOTONIC="1")
    assert process.wait(timeout=250) == 0, folder.output
    assert folder.bytes_below("scores.zarr") == quiet.bytes_below("scores.zarr")
