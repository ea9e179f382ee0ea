"""`kme-dist reproduce`: folds that resume, cells that agree, differ, fail or are skipped, and the page that says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from kme_dist.cli.app import execute
from kme_dist.config import ClusterConfig
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError
from kme_dist.pipelines.reproduce import folds, pictures, published
from kme_dist.pipelines.reproduce import run as reproduce
from kme_dist.pipelines.reproduce.folds import Fold
from kme_dist.pipelines.reproduce.results import Store, status

HERE = ClusterConfig(kind="serial")
MADE = {
    "title": "A made table",
    "source": "nobody",
    "measure": "accuracy, %",
    "better": "higher",
    "digits": 1,
    "protocol": "The figure is made up.",
    "chosen": "Nothing is chosen.",
    "seeds": "none",
    "data": None,
    "folds": 4,
    "quick": {"folds": 2, "text": "Two folds.", "leaves_out": [{"rows": ["b"], "methods": ["N"]}]},
    "methods": ["M", "N"],
    "rows": {"a": {"M": [90.0, 2.0], "N": [99.0, 1.0]}, "b": {"M": [50.0, 1.0], "N": [95.0, 1.0]}},
    "notes": [
        {"rows": ["a"], "methods": ["N"], "note": "The paper has other rows."},
        {"rows": ["a"], "methods": ["M"], "note": "Chosen on test rows.", "always": True},
        {"rows": ["b"], "methods": ["M"], "note": "This is not shown."},
    ],
}


def made_up(fold, X, y):
    if (fold.row, fold.method) == ("b", "N") and fold.fold == 1:
        raise ArithmeticError("no pivot is positive <here>")
    return {"value": {"a": 90.0, "b": 80.0}[fold.row] + fold.fold}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A table of made-up figures: its folder."""
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "made.yaml").write_text(yaml.safe_dump(MADE))
    monkeypatch.setattr(published, "FOLDERS", (tmp_path / "published",))
    monkeypatch.setitem(folds.PROTOCOLS, "made", made_up)
    return tmp_path


def cell(result, row, method):
    return next(c for c in result["cells"] if (c["row"], c["method"]) == (row, method))


def test_cells_are_compared_and_the_page_has_both_figures_and_the_colours(made):
    result = reproduce.run("made", out=str(made / "out"), cluster=HERE)
    assert [cell(result, *at)["status"] for at in (("a", "M"), ("a", "N"), ("b", "M"))] == [
        "agrees",
        "differs",
        "better",
    ]
    assert cell(result, "a", "M")["mean"] == 91.5
    assert cell(result, "a", "M")["spread"] == pytest.approx(np.std([0, 1, 2, 3]))
    page = (made / "out" / "report.html").read_text()
    assert '<td class="good">91.5 ± 1.1<br><small>90.0 ± 2.0' in page
    assert '<td class="warn">91.5 ± 1.1<br><small>99.0 ± 1.0' in page
    assert "The paper has other rows." in page
    assert "Chosen on test rows." in page, "a cell whose settings were not chosen on training rows says so"
    assert "This is not shown." not in page
    assert json.loads((made / "out" / "result.json").read_text())["table"] == "made"


def test_a_cell_that_fails_is_shown_as_failing_and_tried_again(made, monkeypatch):
    result = reproduce.run("made", out=str(made / "out"), cluster=HERE)
    failed = cell(result, "b", "N")
    assert failed["status"] == "failed"
    assert "no pivot is positive" in failed["reason"]
    assert failed["folds"] == 3
    page = (made / "out" / "report.html").read_text()
    assert '<td class="bad">' in page
    assert "no pivot is positive &lt;here&gt;" in page
    monkeypatch.setitem(folds.PROTOCOLS, "made", lambda fold, X, y: {"value": 95.0})
    again = reproduce.run("made", out=str(made / "out"), cluster=HERE)
    assert (again["computed"], again["reused"]) == (1, 15)
    assert cell(again, "b", "N")["status"] != "failed"


def test_nothing_finished_is_computed_twice_unless_settings_or_data_changed(made, monkeypatch):
    reproduce.run("made", out=str(made / "out"), cluster=HERE)
    monkeypatch.setitem(folds.PROTOCOLS, "made", lambda fold, X, y: {"value": 1.0})
    again = reproduce.run("made", out=str(made / "out"), cluster=HERE)
    assert cell(again, "a", "M")["mean"] == 91.5
    (made / "published" / "made.yaml").write_text(yaml.safe_dump({**MADE, "settings": {"steps": 7}}))
    other = reproduce.run("made", out=str(made / "out"), cluster=HERE)
    assert (other["computed"], cell(other, "a", "M")["mean"]) == (16, 1.0)


def test_a_damaged_file_of_a_fold_is_recomputed(tmp_path):
    store, fold = Store(Place.of(tmp_path)), Fold("t", "a/b", "M 1", 3)
    assert store.read(fold) is None
    store.write(fold, {"value": 1.0, "seconds": 0.0})
    assert store.read(fold)["value"] == 1.0
    (path,) = (tmp_path / "cells").iterdir()
    path.write_text(path.read_text()[:20])
    assert store.read(fold) is None


def test_quick_has_fewer_folds_and_says_what_it_leaves_out(made):
    result = reproduce.run("made", quick=True, out=str(made / "out"), cluster=HERE)
    assert [c["folds"] for c in result["cells"]] == [2, 2, 2, 0]
    assert cell(result, "a", "M")["mean"] == 91.5, "the first and the last fold"
    assert (cell(result, "b", "N")["status"], cell(result, "b", "N")["reason"]) == ("skipped", "left out by --quick")
    assert "Two folds." in (made / "out" / "report.html").read_text()


KILLED = """
import os, sys, time
from pathlib import Path
from kme_dist.config import ClusterConfig
from kme_dist.pipelines.reproduce import folds, published, run
published.FOLDERS = (Path(sys.argv[1]) / "published",)
def slow(fold, X, y):
    time.sleep(0.05)
    return {"value": 90.0 + fold.fold}
folds.PROTOCOLS["made"] = slow
run.run("made", out=sys.argv[1] + "/out", cluster=ClusterConfig(kind="serial"))
"""


def test_after_kill_9_only_what_is_missing_is_computed(made):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(made)])
    stored = made / "out" / "cells"
    deadline = time.monotonic() + 60
    while not (stored.is_dir() and len(list(stored.glob("[!.]*.json"))) >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = len(list(stored.glob("[!.]*.json")))
    assert 3 <= kept < 16
    result = reproduce.run("made", out=str(made / "out"), cluster=HERE)
    assert (result["reused"], result["computed"] + 1) == (kept, 16 - kept), "one fold of the made table fails here"


@pytest.mark.parametrize(
    ("change", "figure", "mean", "expected"),
    [
        ({}, [90.0, 1.0], 89.0, "agrees"),
        ({}, [90.0, 1.0], 88.9, "differs"),
        ({}, [90.0, 1.0], 91.1, "better"),
        ({"better": "lower"}, [90.0, 1.0], 91.1, "differs"),
        ({"better": "lower"}, [90.0, 1.0], 88.0, "better"),
        ({"better": "same"}, [56.67, 0.0], 56.67, "agrees"),
        ({"better": "same"}, [56.67, 0.0], 60.0, "differs"),
        ({"lower_is_better": ["a"]}, [90.0, 1.0], 91.1, "differs"),
        ({}, [90.0], 89.6, "agrees"),  # by the deviation of our own folds, 0.5
        ({}, [90.0], 89.3, "differs"),
        ({}, [], 89.3, "unpublished"),
        ({"comparable": False}, [90.0], 10.0, "other data"),
        ({"claim": "above 0"}, [0.0], 0.1, "agrees"),
        ({"claim": "above 0"}, [0.0], -0.1, "differs"),
    ],
)
def test_agreement_is_one_published_deviation_or_better(change, figure, mean, expected):
    table = published.Table.model_validate({**MADE, **change})
    assert status(table, "a", figure, mean, 0.5) == expected


def test_unknown_names_end_with_the_known_ones(made, capsys):
    assert execute(["reproduce", "mad", "--workers", "0"]) == 2
    assert "unknown table mad; known: made" in capsys.readouterr().err
    assert execute(["reproduce", "made", "--workers", "0", "--row", "c", "--out", str(made / "out")]) == 2
    assert "its rows: a, b" in capsys.readouterr().err
    assert execute(["reproduce", "made", "--data", str(made / "nowhere")]) == 2
    assert execute(["reproduce", "made", "--workers", "1", "--scheduler", "tcp://localhost:1"]) == 2


def test_a_missing_data_set_is_skipped_with_its_reason_and_an_empty_table_is_an_error(made, capsys):
    table = {**MADE, "data": "rows"}
    (made / "published" / "made.yaml").write_text(yaml.safe_dump(table))
    (made / "data").mkdir()
    with pytest.raises(ConfigError, match=r"nothing of made can be computed: .*b\.npz does not exist"):
        reproduce.run("made", data=str(made / "data"), out=str(made / "out"), cluster=HERE)
    np.savez(made / "data" / "a.npz", X=np.zeros((2, 1)), y=np.zeros(2))
    arguments = ["reproduce", "made", "--workers", "0", "--quiet", "--data", str(made / "data")]
    assert execute([*arguments, "--out", str(made / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert cell(result, "b", "M")["status"] == "skipped"
    assert "b.npz does not exist" in cell(result, "b", "M")["reason"]
    assert cell(result, "a", "M")["status"] == "agrees"


@pytest.mark.parametrize("name", published.table_names())
def test_every_shipped_table_is_read_and_has_a_protocol(name):
    table = published.read_table(name)
    assert name in folds.PROTOCOLS
    assert all(set(figures) <= set(table.methods) for figures in table.rows.values())
    for selection in [*table.notes, *table.quick.leaves_out]:
        assert set(selection.rows) <= set(table.rows)
        assert set(selection.methods) <= set(table.methods)


def test_a_small_cell_end_to_end_on_the_data_of_scikit_learn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KME_DATA", str(tmp_path / "nowhere"))
    out = str(tmp_path / "out")
    assert execute(["reproduce", "hnr-figure-1", "--row", "overfitted start", "--out", out, "--workers", "0"]) == 0
    shown = capsys.readouterr()
    assert "73.33  published            73.33  agrees" in shown.out
    assert "folds of hnr-figure-1: 2 of 2 (100%)" in shown.err
    page = Path(out, "report.html").read_text()
    assert "Learning from two starts" in page
    assert "not requested" in page


def test_pictures_are_drawn_from_the_records_of_any_table():
    images = {(f"{n} images", m): [{"value": 80.0 + n / 100}] for n in (50, 500) for m in ("RCB", "SVC")}
    pixels = {("pixels 3, 8", "RCB"): [{"value": 97.0, "length_scales": [None, *[2.0] * 783]}]}
    gains = {(f"RBF, n = {n}, d = 30", "B-KMSE"): [{"value": 5.0}, {"value": 3.0}] for n in (10, 20)}
    level = {"density": 0.1, "FISTA": 0.3, "FISTA, refitted": 0.1, "Cholesky": 0.4}
    path = {("sparse path", "gain"): [{"value": 1.0, "levels": [level, {**level, "density": 0.2}]}]}
    for name, records, count in (
        ("hnr-figure-2", {**images, **pixels}, 2),
        ("kmse-figures", gains, 1),
        ("cme-pendulum", path, 1),
        ("kmse-table-1", {("wine", "KME"): [{"value": 0.1}]}, 0),
    ):
        found = pictures.of(name, published.read_table(name), records)
        assert len(found) == count
        assert not any("mathdefault" in picture.svg for picture in found), "numbers at axes are plain"


@pytest.mark.slow
def test_workers_compute_the_same_figures(tmp_path):
    command = [sys.executable, "-m", "kme_dist", "reproduce", "hnr-figure-1", "--json", "--quiet", "--workers", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        capture_output=True,
        check=True,
        env={**os.environ, "KME_DATA": str(tmp_path / "nowhere")},
    )
    assert [c["mean"] for c in json.loads(done.stdout)["cells"]] == pytest.approx([56.667, 73.333] * 2, abs=1e-3)
