"""A disk that fills up at any moment: an error that says to try again, and after some room was made the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess

import numpy as np
import pytest

import kme_dist as kme
from kme_dist.cli.app import execute
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.errors import RetryError
from kme_dist.ops import driver

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
COUNT = 3_000


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model, a data set and a CSV file of the same rows."""
    folder = tmp_path_factory.mktemp("full")
    X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)
    model = kme.MCEClassifier(kernel=Gaussian(length_scale=np.ones(3)), steps=0).fit(X[:100], X[:100, 0] > 0)
    model.save(folder / "model.zarr")
    ingest(X, folder / "rows.zarr", chunk_bytes=12 * 1024)
    ids = np.arange(COUNT)[:, None]
    np.savetxt(folder / "rows.csv", np.hstack([ids, X]), delimiter=",", header="id,x0,x1,x2", comments="", fmt="%g")
    return folder


@pytest.fixture
def disk(tmp_path):
    """A disk of 3 MB, and a function that leaves this many bytes of it."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")

    def leave(bytes_left):
        facts = os.statvfs(path)
        (path / "filler").write_bytes(b"\0" * max(0, facts.f_bavail * facts.f_frsize - bytes_left))

    try:
        yield path, leave
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.chaos(11)
@pytest.mark.parametrize("format", ["zarr", "parquet", "csv"])
@pytest.mark.parametrize("source", ["rows.zarr", "rows.csv"])
def test_predictions_stop_with_one_error_and_resume(root, disk, format, source):
    path, leave = disk
    options = {"format": format, "overwrite": format == "csv", "id_column": "id" if source == "rows.csv" else None}
    failures = []
    for left in (0, 4_096, 12_288, 20_480, 45_056, 81_920, 122_880, 3_000_000):
        leave(left)
        try:
            kme.predict(root / "model.zarr", root / source, path / "out", **options)
        except RetryError as error:
            failures.append(str(error))
        finally:
            (path / "filler").unlink()
    assert 2 < len(failures) < 8
    assert all("no space left" in words for words in failures)
    if format != "csv":
        kme.open_predictions(path / "out").verify()
        assert kme.open_predictions(path / "out").rows == COUNT
    left = {name for name in os.listdir(path) if name != "out"}
    assert left == set()


@pytest.mark.chaos(11)
def test_a_job_records_a_full_disk_as_75_wherever_it_is_noticed(root, disk, monkeypatch, capsys):
    monkeypatch.setattr(driver, "PAUSE_S", 0.0)
    path, leave = disk
    recorded = []
    for turn, left in enumerate(range(8_192, 90_000, 8_192)):
        place = path / str(turn)
        shutil.copytree(root, place, ignore=shutil.ignore_patterns("*.csv"))
        (place / "night.yaml").write_text(
            "data: {source: rows.zarr}\npredict: {model: model.zarr, data: rows.zarr, out: out.zarr}\n"
            "cluster: {kind: serial}\n"
        )
        leave(left)
        code = execute(["schedule", str(place / "night.yaml"), "--once", "--at", "2026-03-01", "--root", str(place)])
        assert code == 75, (left, capsys.readouterr().err)
        events = place / "runs" / "night-20260301T000000Z" / "events.jsonl"
        with contextlib.suppress(FileNotFoundError, IndexError):  # so full that not even the failure could be noted
            last = json.loads(events.read_text().splitlines()[-1])
            recorded.append((last["state"], last.get("exit_code")))
        (path / "filler").unlink()
        shutil.rmtree(place)
    assert len(recorded) > 5
    assert set(recorded) == {("failed", 75)}
