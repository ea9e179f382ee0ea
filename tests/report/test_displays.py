"""Displays in the form of scikit-learn's: what they keep, what they draw, and where."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from matplotlib import pyplot as plt
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier

import kme_dist as kme
from kme_dist.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def fitted():
    data = load_iris(as_frame=True)
    X, y = data.data, data.target_names[data.target]
    return kme.MCEClassifier(steps=20).fit(X[::2], y[::2]), X[1::2], y[1::2]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def test_relevance_is_drawn_with_the_most_relevant_on_top(fitted):
    model = fitted[0]
    shown = kme.RelevanceDisplay.from_estimator(model, most=3)
    np.testing.assert_array_equal(shown.relevance, model.feature_importances_)
    names = [tick.get_text() for tick in shown.ax_.get_yticklabels()]
    order = np.argsort(-model.feature_importances_)[:3]
    assert names == [model.feature_names_in_[i] for i in order]
    assert [bar.get_width() for bar in shown.bars_] == sorted(model.feature_importances_, reverse=True)[:3]


def test_relevance_of_another_library_is_drawn_too(fitted):
    forest = RandomForestClassifier(5, random_state=0).fit(fitted[1], fitted[2])
    shown = kme.RelevanceDisplay.from_estimator(forest)
    assert shown.feature_names == list(forest.feature_names_in_)
    with pytest.raises(ConfigError, match="no feature_importances_"):
        kme.RelevanceDisplay.from_estimator(object())


def test_reliability_is_that_of_the_rows(fitted):
    model, X, y = fitted
    shown = kme.ReliabilityDisplay.from_estimator(model, X, y)
    again = kme.ReliabilityDisplay.from_predictions(y, model.predict_proba(X))
    assert shown.bins == again.bins
    assert sum(part["rows"] for part in shown.bins) == len(y)
    hits = sum(part["rows"] * part["accuracy"] for part in shown.bins) / len(y)
    assert hits == pytest.approx(model.score(X, y))
    np.testing.assert_allclose(shown.line_.get_xdata(), [part["confidence"] for part in shown.bins])
    assert "MCEClassifier" in shown.ax_.get_legend().get_texts()[0].get_text()


def test_reliability_by_hand():
    one = kme.ReliabilityDisplay.from_predictions([0, 1, 1, 0], [0.25, 0.75, 0.75, 0.75])
    assert [(part["rows"], part["confidence"], part["accuracy"]) for part in one.bins] == [(4, 0.75, 0.75)]
    assert one.calibration_error == pytest.approx(0.0)
    two = kme.ReliabilityDisplay.from_predictions(["b", "a"], [[0.9, 0.1], [0.9, 0.1]], classes=["b", "a"])
    assert two.bins[0]["accuracy"] == 0.5
    assert two.calibration_error == pytest.approx(0.4)
    with pytest.raises(DataError, match=r"expected \(2, 2\)"):
        kme.ReliabilityDisplay.from_predictions([0, 1], np.ones((2, 3)) / 3)
    with pytest.raises(DataError, match="label 7 is not among"):
        kme.ReliabilityDisplay.from_predictions([0, 7], np.ones((2, 2)) / 2, classes=[0, 1])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([[0.9, 0.1], [3.0, 4.0]], r"row 1 has the probabilities 3, 4, which are not in \[0, 1\]"),
        ([[0.9, 0.1], [0.6, 0.398]], "row 1 has the probabilities 0.6, 0.398, with the sum 0.998"),
        ([[0.9, 0.1], [1.2, -0.2]], "row 1 .* not in"),
        ([[0.9, 0.1], [np.nan, 0.5]], "row 1 .* not in"),
        ([0.9, 1.5], "row 1 .* not in"),
    ],
)
def test_only_probabilities_are_drawn_as_such(wrong, words):
    with pytest.raises(DataError, match=words):
        kme.ReliabilityDisplay.from_predictions([0, 1], wrong)


def test_probabilities_may_be_rounded():
    kme.ReliabilityDisplay.from_predictions([0, 1], np.array([[0.7, 0.2995], [1.0000001, 0]], np.float32))


@pytest.mark.parametrize("layout", [None, "constrained"])
def test_the_legend_stays_inside_narrow_axes(layout):
    figure, row = plt.subplots(1, 3, layout=layout)
    for axes in row:
        kme.ReliabilityDisplay.from_predictions([0, 1], [0.2, 0.7], name="HistGradientBoostingClassifier", ax=axes)
    figure.draw_without_rendering()
    for axes in row:
        legend, own = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert own.x0 <= legend.x0 < legend.x1 <= own.x1


def test_a_legend_with_room_has_the_usual_size():
    shown = kme.ReliabilityDisplay.from_predictions([0, 1], [0.2, 0.7], name="MCEClassifier")
    assert shown.ax_.get_legend().get_texts()[0].get_fontsize() == plt.rcParams["font.size"]


def test_a_few_bars_share_the_height_of_the_axes():
    for count in (1, 4, 20):
        shown = kme.RelevanceDisplay(np.arange(count) + 1.0, [f"x{i}" for i in range(count)]).plot()
        bottom, top = shown.ax_.get_ylim()
        first, last = shown.bars_[0].get_y(), shown.bars_[-1].get_y() + shown.bars_[-1].get_height()
        assert first - top < 0.6
        assert bottom - last < 0.6


@pytest.mark.parametrize("most", [0, -1, 2.5])
def test_a_number_of_bars_that_is_none_is_refused(most, fitted):
    with pytest.raises(ConfigError, match=f"most={most}: must be an integer >= 1"):
        kme.RelevanceDisplay.from_estimator(fitted[0], most=most)


def test_what_a_model_without_relevance_lacks_and_what_to_use(fitted):
    regressor = kme.CMERegressor(steps=0).fit(fitted[1], np.arange(len(fitted[1]), dtype=float))
    with pytest.raises(ConfigError, match=r"CMERegressor has no feature_importances_: .* permutation_importance"):
        kme.RelevanceDisplay.from_estimator(regressor)
    with pytest.raises(ConfigError, match="call fit first"):
        kme.RelevanceDisplay.from_estimator(kme.MCEClassifier())


def test_a_line_of_the_learning_curve_for_each_phase(fitted):
    history = fitted[0].history_
    shown = kme.LearningCurveDisplay.from_estimator(fitted[0], quantity="risk")
    phases = list(dict.fromkeys(record["phase"] for record in history))
    assert [line.get_label() for line in shown.lines_] == phases
    np.testing.assert_allclose(
        shown.lines_[0].get_ydata(), [record["risk"] for record in history if record["phase"] == phases[0]]
    )
    with pytest.raises(ConfigError, match="quantity='loss' is not recorded"):
        kme.LearningCurveDisplay.from_estimator(fitted[0], quantity="loss")
    with pytest.raises(ConfigError, match="no history_"):
        kme.LearningCurveDisplay.from_estimator(kme.MCEClassifier())


def test_displays_are_drawn_on_given_axes_and_again(fitted):
    _, axes = plt.subplots(1, 2)
    shown = kme.LearningCurveDisplay.from_estimator(fitted[0], ax=axes[0])
    assert shown.ax_ is axes[0]
    assert shown.figure_ is axes[0].figure
    shown.plot(axes[1])
    assert shown.ax_ is axes[1]
    assert len(axes[1].lines) == len(axes[0].lines) > 0


def test_matplotlib_is_imported_for_drawing_only():
    code = "import sys, kme_dist as kme; kme.ReliabilityDisplay; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
