"""docs/benchmarks.md is made of what the benchmarks printed."""

import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks.machine import FIGURES, described, figure
from benchmarks.page import ORDER, PARTS, write_page


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_is_a_command_that_exists(part):
    assert importlib.util.find_spec(part.command.split()[0])
    assert part.section in ORDER


def test_names_are_unique():
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_figures_are_collected_only_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv(FIGURES, raising=False)
    figure("seconds", "ours", "n = 10", 1.5)
    path = tmp_path / "figures.jsonl"
    monkeypatch.setenv(FIGURES, str(path))
    figure("seconds", "ours", 10, 1.5)
    assert json.loads(path.read_text()) == {"picture": "seconds", "series": "ours", "at": 10, "value": 1.5}


@pytest.fixture
def record():
    return {
        "command": "python -m benchmarks.gradient", "output": ["n=2000", "  step 1.0 ms"], "exit_code": 0,
        "figures": [], "seconds": 60, "load_before": "0.1", "commit": "abc", "date": "2026-01-01", "machine": "a box",
    }  # fmt: skip


def test_the_page_shows_output_failures_and_what_is_missing(tmp_path, record):
    folder = tmp_path / "runs" / "bench"
    folder.mkdir(parents=True)
    (folder / "gradient.json").write_text(json.dumps(record))
    (folder / "features.json").write_text(json.dumps({**record, "exit_code": 3, "output": []}))
    write_page(tmp_path / "benchmarks.md", folder)
    page = (tmp_path / "benchmarks.md").read_text()
    assert "```text\nn=2000\n  step 1.0 ms\n```" in page
    assert "commit abc, 1.0 minutes, load before 0.1; a box" in page
    assert "**It failed with exit code 3.**" in page
    assert "`python -m benchmarks.means`: not measured here." in page
    assert "`python -m benchmarks.defaults`: not measured here; run it before" in page


def test_figures_become_bars_or_lines(tmp_path, record):
    folder = tmp_path / "runs" / "bench"
    folder.mkdir(parents=True)
    bars = [
        {"picture": "Step, ms", "series": s, "at": "n = 10", "value": v} for s, v in (("ours", 1.0), ("theirs", 50))
    ]
    lines = [{"picture": "Memory", "series": "ours", "at": rows, "value": 3.0} for rows in (10, 100)]
    (folder / "gradient.json").write_text(json.dumps({**record, "figures": bars + lines}))
    write_page(tmp_path / "benchmarks.md", folder)
    page = (tmp_path / "benchmarks.md").read_text()
    for name in ("step-ms", "memory"):
        assert f"](assets/benchmarks/{name}.svg)" in page
        assert "<svg" in (tmp_path / "assets" / "benchmarks" / f"{name}.svg").read_text()


def test_the_command_runs_a_part_keeps_its_output_and_does_not_run_it_twice(tmp_path):
    page, folder = tmp_path / "benchmarks.md", tmp_path / "runs" / "bench"
    command = [sys.executable, "-m", "benchmarks", "--folder", folder, "--page", page, "--only"]
    first = subprocess.run([*command, "nothing"], capture_output=True, text=True)
    assert first.returncode == 2
    assert "unknown part nothing; see --list" in first.stderr
    folder.mkdir(parents=True)
    (folder / "tails.json").write_text(
        json.dumps(
            {
                "command": "python -m benchmarks.tails", "output": ["as before"], "exit_code": 0, "figures": [],
                "seconds": 1, "load_before": "0", "commit": "abc", "date": "2026-01-01", "machine": described(),
            }
        )
    )  # fmt: skip
    again = subprocess.run([*command, "tails"], capture_output=True, text=True)
    assert again.returncode == 0
    assert "==" not in again.stdout
    assert "as before" in page.read_text()
