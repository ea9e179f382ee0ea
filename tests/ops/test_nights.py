"""Nights in the past, nights of a new model, and nights whose driver is lost."""

from __future__ import annotations

import datetime
import json
import threading
import time
import zoneinfo

import numpy as np
import pytest

import kme_dist as kme
from kme_dist.cli import app as cli
from kme_dist.config import parse_config
from kme_dist.errors import ConfigError
from kme_dist.ops import jobs, schedule, supervisor
from kme_dist.ops.schedule import backfill, backfill_times, dated, fire_times, parse_time, stamp

UTC = datetime.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


def later():
    return parse_time("2030-01-01")


# --- which times ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-03-01..2026-03-03", ["2026-03-01T02:00:00Z", "2026-03-02T02:00:00Z", "2026-03-03T02:00:00Z"]),
        ("2026-03-01..2026-03-01", ["2026-03-01T02:00:00Z"]),
        ("2026-03-01T02:00..2026-03-02T02:00", ["2026-03-01T02:00:00Z", "2026-03-02T02:00:00Z"]),
        ("2026-03-01T02:01..2026-03-02T01:59:59", None),
        ("2026-03-01T03:00+01:00..2026-03-01", ["2026-03-01T02:00:00Z"]),
    ],
)
def test_a_range_includes_both_ends(text, expected):
    trigger = fire_times("0 2 * * *")
    if expected is None:
        with pytest.raises(ConfigError, match="no time of --cron in that range is in the past"):
            backfill_times(trigger, text, UTC, later)
        return
    assert [stamp(when) for when in backfill_times(trigger, text, UTC, later)] == expected


def test_days_are_those_of_the_time_zone_also_when_the_clock_changes():
    times = backfill_times(fire_times("30 0 * * *", "Europe/Berlin"), "2026-03-28..2026-03-30", BERLIN, later)
    assert [stamp(when) for when in times] == ["2026-03-27T23:30:00Z", "2026-03-28T23:30:00Z", "2026-03-29T22:30:00Z"]


def test_the_future_is_left_to_the_schedule():
    trigger = fire_times("0 2 * * *")
    times = backfill_times(trigger, "2026-03-01..2026-03-09", UTC, lambda: parse_time("2026-03-02T02:00Z"))
    assert [stamp(when) for when in times] == ["2026-03-01T02:00:00Z", "2026-03-02T02:00:00Z"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2026-03-01", "must be FROM..TO"),
        ("2026-03-02..2026-03-01", "ends before it begins"),
        ("yesterday..today", "'yesterday' is not a date or time"),
        ("2026-03-01..", "'' is not a date or time"),
    ],
)
def test_mistakes_in_a_range_are_named(text, words):
    with pytest.raises(ConfigError, match=words):
        backfill_times(fire_times("0 2 * * *"), text, UTC, later)


# --- in order, each once ----------------------------------------------------------------------------


class Runs:
    """Runs of commands with given exit codes, and which are done by then."""

    def __init__(self, monkeypatch, codes):
        self.codes, self.started, self.done, self.said = list(codes), [], set(), []
        monkeypatch.setattr(schedule, "_run", self.run)
        self.stop = threading.Event()
        self.times = backfill_times(fire_times("0 2 * * *"), "2026-03-01..2026-03-04", UTC, later)

    def run(self, command, stop):
        self.started.append(command[0])
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            self.done.add(command[0])
        return code

    def backfill(self):
        return backfill(
            self.times,
            start=lambda when: [f"{when:%d}"],
            is_done=lambda when: f"{when:%d}" in self.done,
            stop=self.stop,
            say=self.said.append,
            pause_s=0.0,
        )


def test_all_times_run_in_order_and_a_second_call_runs_none(monkeypatch):
    runs = Runs(monkeypatch, [])
    assert runs.backfill() == 0
    assert runs.started == ["01", "02", "03", "04"]
    assert runs.backfill() == 0
    assert len(runs.started) == 4
    assert runs.said[-1] == "4 scheduled times from 2026-03-01T02:00:00Z to 2026-03-04T02:00:00Z, 4 done"


def test_a_failure_stops_the_rest_and_the_same_call_resumes_there(monkeypatch):
    runs = Runs(monkeypatch, [0, 2])
    assert runs.backfill() == 2
    assert runs.started == ["01", "02"]
    assert runs.said[-1] == "stopped at 2026-03-02T02:00:00Z, 3 left; resume with the same command"
    assert runs.backfill() == 0
    assert runs.started == ["01", "02", "02", "03", "04"]


def test_an_infrastructure_failure_is_retried_before_the_next_time(monkeypatch):
    runs = Runs(monkeypatch, [75, -9, 0, 75, 75, 75])
    assert runs.backfill() == 75
    assert runs.started == ["01", "01", "01", "02", "02", "02"]


# --- from the command line --------------------------------------------------------------------------


def table(seed, count=60):
    X = np.random.default_rng(seed).normal(size=(count, 3))
    return X, (X[:, 0] > 0).astype(int)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with a model and three days of rows; runs of a schedule happen in this process."""
    kme.MCEClassifier(steps=0).fit(*table(0)).save(tmp_path / "model.zarr")
    for day in (1, 2, 3):
        np.save(tmp_path / f"rows-2026-03-0{day}.npy", table(day)[0])
    (tmp_path / "nightly.yaml").write_text(
        "data: {source: none.zarr}\n"
        "predict: {model: model.zarr, data: 'rows-{date}.npy', out: 'scores/{date}.zarr', outputs: [label]}\n"
        "cluster: {kind: serial}\n"
    )
    monkeypatch.setattr(schedule, "_run", lambda command, stop: cli.execute(command[3:]))
    monkeypatch.setattr(schedule, "FIRST_PAUSE_S", 0.0)
    return tmp_path


def test_days_in_the_past_are_predicted_each_from_its_own_rows(root, capsys):
    command = ["schedule", str(root / "nightly.yaml"), "--cron", "0 2 * * *", "--root", str(root)]
    command += ["--backfill", "2026-03-01..2026-03-03"]
    (root / "rows-2026-03-02.npy").rename(root / "late.npy")
    assert cli.execute(command) == 2
    assert "rows-2026-03-02.npy" in capsys.readouterr().err
    assert sorted(path.name for path in (root / "scores").glob("*.zarr")) == ["2026-03-01.zarr"]
    (root / "late.npy").rename(root / "rows-2026-03-02.npy")
    first = (root / "scores" / "2026-03-01.zarr" / "_manifest.json").stat().st_mtime_ns
    assert cli.execute(command) == 0
    assert "3 scheduled times from 2026-03-01T02:00:00Z to 2026-03-03T02:00:00Z, 1 done" in capsys.readouterr().err
    model = kme.load(root / "model.zarr")
    for day in (1, 2, 3):
        found = kme.open_predictions(root / "scores" / f"2026-03-0{day}.zarr")
        np.testing.assert_array_equal(found.labels(), model.predict(table(day)[0]))
    assert (root / "scores" / "2026-03-01.zarr" / "_manifest.json").stat().st_mtime_ns == first
    done = [job.status()["state"] for job in jobs.list_jobs(root)]
    assert done == ["succeeded"] * 3


def test_the_date_is_that_of_the_time_zone():
    config = parse_config({"data": {"source": "x"}, "predict": {"data": "in/{date}.csv", "out": "out-{time}.zarr"}})
    found = dated(config, parse_time("2026-03-01T23:30:00Z"), BERLIN)
    assert (found.predict.data, found.predict.out) == ("in/2026-03-02.csv", "out-2026-03-02T0030.zarr")


def test_mistakes_are_said_before_anything_runs(root, capsys):
    command = ["schedule", str(root / "nightly.yaml"), "--root", str(root)]
    for options, words in [
        (["--backfill", "2026-03-01..2026-03-03"], "--cron is missing"),
        (["--cron", "0 2 * * *", "--backfill", "march"], "must be FROM..TO"),
        (["--cron", "0 2 * * *", "--on-model-change", "replace"], "on_model_change"),
        (["--cron", "0 2 * * *", "--timezone", "Mars/Olympus", "--backfill", "2026-03-01..2026-03-02"], "is unknown"),
    ]:
        assert cli.execute([*command, *options]) == 2
        assert words in capsys.readouterr().err
    assert not (root / "runs").exists()


# --- a model that has changed -----------------------------------------------------------------------


def night(root, day, capsys, *options):
    """The exit code of a night, its result and what it printed."""
    command = ["schedule", str(root / "nightly.yaml"), "--once", "--at", f"2026-04-{day:02d}T02:00Z"]
    changes = ["--set", "predict.data=rows-2026-03-01.npy", "--set", "predict.out=scores.zarr"]
    code = cli.execute([*command, "--root", str(root), "--json", "--quiet", *changes, *options])
    seen = capsys.readouterr()
    return code, None if code else json.loads(seen.out), seen.err


def test_a_new_model_is_refused_replaces_predictions_or_gets_a_folder_of_its_own(root, capsys):
    X, old = table(1)[0], kme.load(root / "model.zarr")
    assert night(root, 1, capsys)[0] == 0
    new = kme.MCEClassifier(steps=0).fit(X[:, ::-1].copy(), table(1)[1])
    new.save(root / "model.zarr")
    code, _, error = night(root, 2, capsys)
    assert code == 2
    assert "with other settings (model changed)" in error
    assert night(root, 2, capsys, "--on-model-change", "refuse")[0] == 2
    code, facts, _ = night(root, 3, capsys, "--on-model-change", "new-folder")
    assert code == 0
    path = facts["result"]["predictions"]
    assert path.startswith(f"{root}/scores-")
    assert path.endswith(".zarr")
    np.testing.assert_array_equal(kme.open_predictions(path).labels(), new.predict(X))
    np.testing.assert_array_equal(kme.open_predictions(root / "scores.zarr").labels(), old.predict(X))
    code, facts, _ = night(root, 4, capsys, "--on-model-change", "new-folder")
    assert (code, facts["result"]["predictions"], facts["result"]["computed"]) == (0, path, 0)
    code, facts, _ = night(root, 5, capsys, "--on-model-change", "recompute")
    assert (code, facts["result"]["computed_rows"]) == (0, 60)
    np.testing.assert_array_equal(kme.open_predictions(root / "scores.zarr").labels(), new.predict(X))
    code, facts, _ = night(root, 6, capsys, "--on-model-change", "recompute")
    assert (code, facts["result"]["computed_rows"]) == (0, 0)
    code, _, error = night(root, 7, capsys, "--on-model-change", "new-folder", "--set", "predict.out=scores.csv")
    assert code == 2
    assert "not supported for CSV" in error


# --- a night that has lost its driver ---------------------------------------------------------------


def test_lost_jobs_are_resubmitted_while_a_schedule_runs(root, monkeypatch, capsys):
    sent = threading.Event()
    config = parse_config({"data": {"source": "table.zarr"}})
    lost = jobs.create_job(root, pipeline="evaluate", config=config, name="lost", job_id="lost-1")
    lost.event("waiting", scheduler="tcp://127.0.0.1:1")
    monkeypatch.setattr(supervisor, "on_scheduler", lambda found, cluster: [{"state": None} for _ in found])
    monkeypatch.setattr(supervisor, "submit", lambda job, *_, **__: sent.set())
    monkeypatch.setattr(supervisor.Supervisor.keep, "__defaults__", (0.02,))

    def waits(command, stop):
        assert sent.wait(60), "nobody looked after the lost job"
        return 0

    monkeypatch.setattr(schedule, "_run", waits)
    command = ["schedule", str(root / "nightly.yaml"), "--cron", "0 2 * * *", "--root", str(root)]
    command += ["--backfill", "2026-03-01..2026-03-01", "--scheduler", "tcp://127.0.0.1:1"]
    assert cli.execute(command) == 0
    assert "lost-1: was waiting without a driver; resubmitted (1 of 5)" in capsys.readouterr().err
    deadline = time.monotonic() + 20
    while any(thread.name == "kme-supervisor" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the supervisor outlives the schedule"
        time.sleep(0.02)
