"""Every exit code of the table in docs/operations.md, produced by a command line, as a wrapper or a timer sees it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kme_dist.cli.app import execute
from kme_dist.data.leases import writer_lease
from kme_dist.data.places import Place

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
CONFIG = """
data: {source: table.zarr}
model: {objective: rcb, kernel: gaussian}
learn: {steps: 2, batch_size: 40}
cluster: {kind: serial}
output: {folder: run}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a data set and a config, as the current folder."""
    monkeypatch.chdir(tmp_path)
    X = np.random.default_rng(0).normal(size=(80, 3))
    np.savez("table.npz", X=X, y=(X[:, 0] > 0).astype(int))
    assert execute(["ingest", "table.npz", "table.zarr", "--label", "y", "--quiet"]) == 0
    Path("c.yaml").write_text(CONFIG)
    return tmp_path


def done(folder):
    """Also the second time, when there is nothing left to do."""
    return {execute(["learn", "c.yaml", "--quiet"]) for _ in range(2)}


def bug(folder):
    command = (
        "import kme_dist.pipelines.learn as p; del p.run; from kme_dist.cli import main; main(['learn', 'c.yaml'])"
    )
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" in ended.stderr
    assert "(a bug in kme-dist)" in ended.stderr.splitlines()[-1]
    return {ended.returncode}


def users_input(folder):
    wrong = (["learn", "absent.yaml"], ["learn", "c.yaml", "--set", "learn.steps=many"], ["learn", "--nonsense"])
    return {execute([*command]) for command in wrong}


def numerical_failure(folder):
    divergent = ["model.objective=erm", "learn.learning_rate=1e6", "model.dtype=float32", "learn.steps=3"]
    return {execute(["learn", "c.yaml", "--quiet", *(f"--set={change}" for change in divergent)])}


def corrupt(folder):
    chunk = max(
        (path for path in (folder / "table.zarr" / "X").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(bytes(content))
    return {execute(["inspect", "table.zarr", "--verify"]), execute(["learn", "c.yaml", "--quiet"])}


def try_again(folder):
    with writer_lease(Place.of(folder / "run")):  # another process is at work there
        return {execute(["learn", "c.yaml", "--quiet"])}


def interrupted(number):
    def by_signal(folder):
        command = [sys.executable, "-m", "kme_dist", "learn", "c.yaml", "--set=learn.steps=1000000"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline, steps = time.monotonic() + 240, folder / "run" / "metrics.jsonl"
        while not steps.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=240)
        assert "finished work is saved; resume with: kme-dist learn c.yaml" in said.splitlines()[-1]
        return {process.returncode}

    return by_signal


PRODUCED = {
    0: done,
    1: bug,
    2: users_input,
    3: numerical_failure,
    65: corrupt,
    75: try_again,
    130: interrupted(signal.SIGINT),
    143: interrupted(signal.SIGTERM),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of a learning that diverges
@pytest.mark.parametrize("code", PRODUCED)
def test_a_command_ends_with(folder, code):
    assert PRODUCED[code](folder) == {code}


def test_the_table_of_the_runbook_has_these_codes_and_no_others():
    table = PAGE.read_text(encoding="utf-8").split("| code | meaning | retry? |")[1].split("\n\n")[0]
    codes = [int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in cell.split(",")]
    assert codes == list(PRODUCED)
