"""What `verbose` prints: nothing, a short account, or every step; to stderr."""

from __future__ import annotations

import pytest
from sklearn.datasets import load_iris

from kme_dist import CENClassifier, MCEClassifier
from kme_dist.errors import ConfigError
from kme_dist.models.account import SECONDS_BETWEEN_LINES, Account
from kme_dist.run.train import _AUTO_STEPS

IRIS = load_iris(return_X_y=True)


def printed(capsys, clf, **arguments):
    clf.fit(*IRIS, **arguments)
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


@pytest.mark.parametrize("kind", [MCEClassifier, CENClassifier])
def test_nothing_is_printed_unless_asked_for(kind, capsys):
    assert printed(capsys, kind(steps=3)) == []


def test_a_fit_is_told_from_rows_to_seconds(capsys):
    stopping = {"steps": 400, "early_stopping": True, "n_iter_no_change": 5}
    lines = printed(capsys, MCEClassifier(**stopping, calibration="temperature", verbose=1))
    assert lines[0] == "MCEClassifier: 150 rows, 4 features, 3 classes, objective auto"
    text = "\n".join(lines)
    assert "calibrated: starts with q " in text
    assert text.count(f"of {_AUTO_STEPS} steps in ") == text.count("stopped at a plateau of 5 steps") == 1
    assert text.count("fit: 149 of 150 rows are different") == 1
    assert text.count("fit: cholesky on 149 rows (") == 1  # which solver and why
    assert "leave-one-out log loss: " in text
    assert text.count("learned matern-3/2 0.") == text.count("common matern-3/2 0.") == 1
    assert "; kept " in text
    assert "lambda " in text
    assert "calibration temperature " in text
    assert lines[-1].startswith("  done in ")
    assert len(lines) < 15  # an account, not a log


def test_all_steps_are_said_to_be_made_and_a_warm_start_is_named(capsys):
    clf = MCEClassifier(steps=4, objective="rcb", verbose=True, warm_start=True)
    lines = printed(capsys, clf)
    assert any("rcb: 4 of 4 steps in " in line and "all steps made" in line for line in lines)
    assert not any("learned before" in line for line in lines)
    assert any("starts from what was learned before: Gaussian(" in line for line in printed(capsys, clf))


@pytest.mark.parametrize("clf", [MCEClassifier(steps=7, objective="rcb"), CENClassifier(hidden=(4,), steps=7)])
def test_two_prints_every_step_and_callbacks_hear_them_too(clf, capsys):
    heard = []
    lines = printed(capsys, clf.set_params(verbose=2), callback=heard.append)
    for step in range(1, 8):
        assert sum(f" step {step}/7 " in line for line in lines) == 1
    assert len(heard) == 7


def test_lines_of_progress_come_by_time(capsys):
    now = [0.0]
    account = Account(1, "Name", clock=lambda: now[0])
    for step in range(1, 101):
        account.step({"phase": "rcb", "step": step, "steps": 200, "objective": 1.0})
        now[0] += 0.5
    lines = [line for line in capsys.readouterr().err.splitlines() if " step " in line]
    assert len(lines) == 50 / SECONDS_BETWEEN_LINES - 1
    assert lines[0] == "  rcb: step 11/200  q 1  2 steps/s  ETA 94 s"


def test_a_wrong_level_is_named():
    with pytest.raises(ConfigError, match="verbose='yes': must be an integer >= 0"):
        MCEClassifier(verbose="yes").fit(*IRIS)
