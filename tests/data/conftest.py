"""Shared pieces of the data tests: the folder of shared data sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = Path(os.environ.get("KME_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "iris.npz").exists():
        pytest.skip("the shared data sets are not here; set KME_DATA to their folder")
    return folder
