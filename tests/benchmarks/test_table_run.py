"""A run of the benchmark: cells in processes of their own, results that survive a kill, summary and page."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.defaults import __main__ as command
from benchmarks.defaults import cell, page, results, summary
from benchmarks.defaults.ranks import Table


def task(**changed):
    return {"set": "iris", "split": 0, "model": "knn", "development": False, "limit": 60, "code": None, **changed}


def test_a_cell_has_all_figures():
    record = cell.run(task(model="svc"))
    assert record["status"] == "ok", record
    assert record["train"] + record["test"] == 150
    assert 0.8 < record["accuracy"] <= 1
    assert 0 < record["log_loss"] < 1
    assert record["calibrate_cpu"] > 0
    assert sum(rows for rows, *_ in record["reliability"]) == record["test"]


def test_a_cell_stops_at_its_limit():
    record = cell.run(task(set="digits", model="gp", limit=3))
    assert (record["status"], record["reason"]) == ("over", "over 3 s")
    assert "accuracy" not in record


def test_a_cell_that_fails_says_why():
    record = cell.run(task(set="no-such-set"))
    assert record["status"] == "failed"
    assert "unknown set 'no-such-set'" in record["reason"]


def test_development_cells_read_folds_of_the_development_rows(monkeypatch):
    read = []
    monkeypatch.setattr(cell, "rows_of", lambda *given: read.append(given) or (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        cell.measure(task(development=True), print)
    assert read == [("iris", 0, True)]


def test_a_line_that_a_kill_left_unfinished_is_closed_and_skipped(tmp_path, record):
    path = tmp_path / "results.jsonl"
    results.append(path, record())
    path.write_text(path.read_text() + '{"set": "wi')
    results.append(path, record("wine"))
    assert [r["set"] for r in results.read(path)] == ["iris", "wine"]


def test_the_last_record_of_a_cell_counts(tmp_path, record):
    path = tmp_path / "results.jsonl"
    for accuracy in (0.1, 0.2):
        results.append(path, record(accuracy=accuracy))
    assert [r["accuracy"] for r in results.read(path)] == [0.2]


def test_resume_measures_what_is_missing_failed_or_of_other_code(record):
    tasks = [
        task(model=m, code="new" if m == "mce" else None, limit=900.0) for m in ("mce", "svc", "knn", "gp", "xgboost")
    ]
    records = [
        record(model="mce", code="old"),
        record(model="svc"),
        record(model="knn", status="failed"),
        record(model="gp", status="over", limit=100.0),
        record(model="xgboost", status="empty", reason="not installed"),
    ]
    assert [t["model"] for t in results.missing(tasks, records)] == ["mce", "knn", "gp", "xgboost"]
    records[3]["limit"] = 900.0
    assert "gp" not in [t["model"] for t in results.missing(tasks, records)]


def test_code_changes_with_every_source_file(tmp_path):
    (tmp_path / "kme_dist").mkdir()
    (tmp_path / "kme_dist" / "a.py").write_text("1")
    first = results.code_of(tmp_path)
    (tmp_path / "kme_dist" / "b.py").write_text("")
    assert results.code_of(tmp_path) != first


@pytest.fixture
def measured(monkeypatch, record):
    """Cells without processes; the list has what was run."""
    ran = []

    def run(one, source=None):
        ran.append((one["set"], one["split"], one["model"]))
        return record() | one

    monkeypatch.setattr(cell, "run", run)
    return ran


def test_a_run_resumes_where_it_was_killed(tmp_path, measured, capsys):
    options = ["--sets", "iris,wine", "--models", "mce,svc,knn", "--splits", "2", "--out", str(tmp_path / "out")]
    command.main(options)
    whole = list(measured)
    assert len(whole) == len(set(whole)) == 12
    assert {(split, number) for number, (_, split, _) in enumerate(whole)} == {(n // 6, n) for n in range(12)}
    path = tmp_path / "out" / "results.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:7]) + "\n" + lines[7][:40])
    measured.clear()
    command.main([*options, "--resume"])
    assert measured == whole[7:]
    assert len([json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]) == 12
    said = capsys.readouterr().out
    assert said.count("5 of 12 cells to measure") == 1
    assert (tmp_path / "out" / "summary.txt").read_text() in said


def stopping(monkeypatch, record, labels):
    """Cells of kNN are stopped by the limit, after the labels or before; the list has what was run."""
    ran = []

    def run(one, source=None):
        ran.append((one["set"], one["split"], one["model"], "labels_only" in one))
        found = record() | one
        if one["model"] == "knn":
            found |= {"status": "over", "reason": "over 900 s"}
            for figure in ("log_loss", *(() if labels else ("accuracy", "fit_cpu"))):
                del found[figure]
        return found

    monkeypatch.setattr(cell, "run", run)
    return ran


OVER = ["--sets", "iris,wine", "--models", "svc,knn", "--splits", "3"]


def test_a_stopped_model_is_not_tried_on_further_splits(tmp_path, monkeypatch, record):
    ran = stopping(monkeypatch, record, labels=False)
    command.main([*OVER, "--out", str(tmp_path)])
    assert [key[:2] for key in ran if key[2] == "knn"] == [("iris", 0), ("wine", 0)]
    assert sum(key[2] == "svc" for key in ran) == 6
    found = {results.key(r)[:3]: r for r in results.read(tmp_path / "results.jsonl")}
    assert len(found) == 12
    skipped = found["wine", 2, "knn"]
    assert (skipped["status"], skipped["reason"]) == ("over", "over 900 s in split 0")
    assert "accuracy" not in skipped
    ran.clear()
    command.main([*OVER, "--out", str(tmp_path), "--resume"])
    assert not ran
    command.main([*OVER, "--out", str(tmp_path), "--resume", "--limit", "1000"])  # a higher limit: tried again
    assert [key[:2] for key in ran] == [("iris", 0), ("wine", 0)]


def test_a_model_stopped_after_its_labels_gives_labels_on_further_splits(tmp_path, monkeypatch, record):
    ran = stopping(monkeypatch, record, labels=True)
    command.main([*OVER, "--out", str(tmp_path)])
    assert [key[1:] for key in ran if key[:3:2] == ("iris", "knn")] == [
        (0, "knn", False), (1, "knn", True), (2, "knn", True),
    ]  # fmt: skip


def test_a_cell_of_labels_only_has_an_accuracy_and_no_log_loss():
    record = cell.run(task(labels_only=True))
    assert record["status"] == "over"
    assert record["accuracy"] > 0.8
    assert "log_loss" not in record
    assert record["reason"] == "probabilities over the limit on another split"


def test_results_are_not_added_to_unless_requested(tmp_path, measured):
    options = ["--sets", "iris", "--models", "svc", "--splits", "1", "--out", str(tmp_path)]
    command.main(options)
    with pytest.raises(SystemExit, match=r"already exists; add to it with --resume"):
        command.main(options)


def test_unknown_models_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="unknown model tree; use mce, svc"):
        command.main(["--models", "tree", "--out", str(tmp_path)])


def test_an_unknown_commit_is_refused_before_anything_is_measured(tmp_path, measured):
    with pytest.raises(SystemExit, match="--before no-such is not a commit"):
        command.main(["--before", "no-such", "--sets", "iris", "--out", str(tmp_path / "out")])
    assert not measured
    assert not (tmp_path / "out").exists()


def test_development_uses_three_folds(tmp_path, measured):
    command.main(["--development", "--sets", "iris", "--models", "knn", "--out", str(tmp_path)])
    assert [split for _, split, _ in measured] == [0, 1, 2]
    assert "no row of the reserve" in (tmp_path / "report.html").read_text()


def cells(record, sets, models=("mce", "svc", "svc-grid", "knn", "gp", "before")):
    found = []
    for i, name in enumerate(sets):
        for j, model in enumerate(models):
            found += [
                record(name, model, split, accuracy=0.8 + 0.01 * j + 0.002 * split, train=100 * (i + 1))
                for split in (0, 1)
            ]
    return found


def test_the_page_has_every_set_and_model_and_no_network(record):
    records = cells(record, ["iris", "wine", "digits"])
    text = page.render(Table(records, 2), records, False)
    for word in ("iris", "wine", "digits", "SVC grid", "MCE before", "Critical difference, accuracy", "reserve"):
        assert word in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text


@pytest.mark.parametrize("models", [("mce",), ("svc", "knn"), ("mce", "svc", "gp")])
def test_a_page_of_one_set_and_few_models_is_written(record, models):
    records = cells(record, ["iris"], models)
    text = page.render(Table(records, 2), records, False)
    assert "Critical difference, " not in text  # of one set there is none
    assert summary.text(Table(records, 2), "one set").startswith("one set")


def test_best_figures_are_bold(record):
    records = [record(accuracy=0.91), record(model="svc", accuracy=0.92), record(model="knn", accuracy=0.92)]
    text = page.render(Table(records, 1), records, False)
    assert "<b>92.0</b>" in text
    assert "<td>91.0</td>" in text


def promised(records, splits=1):
    return {label[:3]: value for label, value in summary.promises(Table(records, splits))}


def test_the_ratio_of_seconds_is_taken_at_four_to_six_thousand_rows(record):
    records = [record("satimage", train=4827, fit_cpu=2.0), record("satimage", "svc-grid", train=4827, fit_cpu=50.0)]
    records += [record("wine", fit_cpu=1.0), record("wine", "svc-grid", fit_cpu=1.0)]
    assert promised(records)["(a)"] == "25.0 (satimage)"


def test_a_stopped_grid_gives_a_lower_limit_of_the_ratio(record):
    over = record("satimage", "svc-grid", train=4827, status="over", reason="over 900 s")
    del over["fit_cpu"]
    assert promised([record("satimage", train=4827, fit_cpu=2.0), over])["(a)"] == "at least 450.0 (satimage)"


def test_sets_behind_svc_are_named(record):
    records = [record(accuracy=0.90), record(model="svc", accuracy=0.91)]
    records += [record("wine", accuracy=0.95), record("wine", "svc", accuracy=0.91)]
    assert promised(records)["(d)"] == "FAIL: iris (-1.0, allowed 0.5)"
    assert promised(records[2:])["(d)"] == "pass on 1 set"
    assert promised(records[:1])["(d)"] == "not measured"


def of_two_splits(record, name, ours, theirs):
    return [
        record(name, model, split, accuracy=accuracy)
        for model, both in (("mce", ours), ("svc", theirs))
        for split, accuracy in enumerate(both)
    ]


def test_the_rule_against_svc_allows_one_standard_error_over_splits(record):
    records = of_two_splits(record, "iris", (0.88, 0.90), (0.90, 0.90))  # behind by 1 point, standard error 1
    records += of_two_splits(record, "wine", (0.89, 0.89), (0.90, 0.90))  # behind by 1 point, without spread
    records += of_two_splits(record, "digits", (0.97, 0.97), (0.90, 0.90))
    figures = Table(records, 2)
    found = {one.name: one for one in summary.against_svc(figures)}
    assert {name: one.passed for name, one in found.items()} == {"iris": True, "wine": False, "digits": True}
    assert found["iris"].error == pytest.approx(1.0)
    assert found["iris"].allowed == pytest.approx(1.0)
    assert found["wine"].allowed == pytest.approx(0.5)
    text, shown = summary.text(figures, "two splits"), page.render(figures, records, False)
    assert re.search(r"wine +-1.00 +0.00 +0.50 +FAIL", text)
    assert re.search(r"iris +-1.00 +1.00 +1.00 +pass", text)
    assert "<td><b>FAIL</b></td>" in shown
    assert "Accuracy against SVC()" in shown


def test_without_a_second_split_there_is_no_standard_error(record):
    records = [record(accuracy=0.90), record(model="svc", accuracy=0.90)]
    assert re.search(r"iris +\+0.00 +one split +0.50 +pass", summary.text(Table(records, 1), "one split"))


def test_an_earlier_state_of_ourselves_takes_no_rank(record):
    records = [record(), record(model="svc", accuracy=0.8), record(model="before", accuracy=0.95)]
    assert promised(records)["(b)"] == "MCE 1.00, SVC 2.00 (1 set)"
    assert promised(records)["(c)"] == "MCE 1.50, SVC 1.50 (1 set)"
