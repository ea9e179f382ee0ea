"""What the soak measures: pauses after kills, slopes with honest errors, processes that are restarted."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import soak
from benchmarks.soak import Episode, Service, slope
from kme_dist.data.places import Place
from kme_dist.data.receipts import Receipt, write_receipt


def test_recovery_is_the_longest_pause_after_the_kill():
    assert Episode([(10.0, "worker")], "predict", [10.2, 10.4, 17.4, 17.6]).recovery_s == pytest.approx(7.0)
    assert Episode([(10.0, "driver")], "predict", [14.0, 14.5]).recovery_s == pytest.approx(4.0)


def test_kills_without_recovery_in_between_count_as_the_most_severe():
    both = Episode([(10.0, "driver"), (12.0, "worker")], "predict", [15.0, 15.1])
    assert (both.kind, both.recovery_s) == ("driver", pytest.approx(5.0))
    again = Episode([(10.0, "driver"), (12.0, "driver")], "predict", [11.0, 15.0])
    assert again.recovery_s == pytest.approx(3.0), "the second kill begins it anew"
    assert Episode([(1.0, "worker"), (2.0, "scheduler"), (3.0, "driver")], "predict", [4.0]).kind == "scheduler"


def test_a_job_has_recovered_when_it_makes_progress():
    episode = Episode([(10.0, "worker")], "predict")
    assert not episode.recovered(10.1)
    episode.marks.append(10.5)
    assert episode.recovered(11.0)
    assert not episode.recovered(10.5 + soak.CALM_S), "a step that was under way, and none since"


@pytest.mark.parametrize("kind", ["predict", "short rounds"])
def test_every_chunk_and_every_step_is_progress(tmp_path, kind):
    work = soak.Work(SimpleNamespace(), tmp_path, kind, 7)
    assert work.progress() is None
    place, steps = Place.of(tmp_path / "output" / f"{work.id}.zarr"), tmp_path / "output" / work.id / "metrics.jsonl"
    steps.parent.mkdir(parents=True)
    seen = []
    for number in range(3):
        if kind == "predict":
            write_receipt(place, Receipt("job", number, "epoch", "", (), {}, 0))
        else:
            with steps.open("a") as file:
                file.write("{}\n")
        seen.append(work.progress())
    assert None not in seen
    assert len({str(one) for one in seen}) == 3


def test_a_slope_comes_with_the_error_of_correlated_values():
    rng, hours = np.random.default_rng(0), np.linspace(0.0, 1.0, 1800)
    noise = np.repeat(rng.normal(size=60), 30)  # steps, as memory has
    errors = []
    for _ in range(50):
        values = 300 + 5 * hours + rng.permutation(noise.reshape(60, 30)).ravel()
        rate, error = slope(hours, values)
        errors.append((rate - 5) / error)
    assert 0.5 < np.std(errors) < 2.0, "not by the thirty values of a step, which are one"
    assert slope(hours, 7 * hours) == (pytest.approx(7.0), pytest.approx(0.0, abs=1e-9))


def test_a_service_is_restarted_after_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "RESTART_S", 0.05)
    service = Service("ends at once", [sys.executable, "-c", ""], {}, tmp_path)
    deadline = time.monotonic() + 60
    while service.starts < 3 and time.monotonic() < deadline:
        service.tend()
        time.sleep(0.01)
    service.end()
    assert service.starts == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_survive_a_minute_of_kills_with_the_same_bits(tmp_path, monkeypatch, capsys):
    short = {"steps": 150, "batch_size": 300, "batches_per_step": 2, "checkpoint_steps": 20}
    monkeypatch.setattr(soak, "WORK", {"short rounds": ("learn", short), "predict": ("predict", {})})
    soak.main(["--minutes", "1", "--every", "5", "--chunks", "200", "--folder", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "BITS" not in printed
    assert "results have the bits of the undisturbed run" in printed
    assert "worst" in printed
