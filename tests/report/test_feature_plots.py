"""Pictures of learned features: drawn without a window, with what they promise in them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.figure import Figure

from kme_dist.core import features as maps
from kme_dist.errors import ConfigError
from kme_dist.report import plots as feature_plots


def png(figure):
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def test_frequencies_show_every_input_before_and_after():
    start = maps.spectral(4, 50, seed=0)
    figure = feature_plots.frequencies(start.replace(first=start.first * 3), start, names=list("abcd"))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abcd")
    assert "100 learned frequencies" in axes.get_title(loc="left")
    assert len(axes.lines) == 4 * 2 * 3 + 1
    assert png(figure).startswith(b"\x89PNG")
    assert png(feature_plots.frequencies(maps.random_fourier(2, 9)))
    with pytest.raises(ConfigError, match="spectral map"):
        feature_plots.frequencies(maps.Identity())


def test_of_many_inputs_those_with_the_widest_frequencies_are_shown():
    start = maps.spectral(40, 30, seed=0)
    first = np.array(start.first)
    first[17] *= 50
    axes = feature_plots.frequencies(start.replace(first=first)).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == feature_plots.MOST_INPUTS
    assert "x17" in labels
    assert "20 of 40 inputs" in axes.get_title(loc="left")


def test_reach_is_one_over_a_length_scale():
    phi = maps.random_fourier(3, 20_000, length_scale=np.array([0.5, 1.0, 4.0]), seed=0)
    np.testing.assert_allclose(1 / feature_plots.reach(phi), [0.5, 1.0, 4.0], rtol=0.05)


def test_pixels_without_a_number_are_blank_and_a_figure_can_be_given(rng):
    scales = rng.uniform(1, 10, (4, 4))
    scales[0, 0] = np.nan
    figure = Figure()
    assert feature_plots.pixel_length_scales({"": scales}, figure=figure) is figure
    image = figure.axes[0].images[0]
    assert np.isfinite(image.get_clim()).all()
    assert np.ma.getmaskarray(image.get_array())[0, 0]
    assert png(figure)


def test_pixel_maps_share_one_scale(rng):
    scales = {"0 and 1": rng.uniform(1, 10, (8, 8)), "3 and 8": rng.uniform(1, 100, (8, 8))}
    figure = feature_plots.pixel_length_scales(scales)
    images = [axes.images[0] for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in figure.axes[:2]] == list(scales)
    assert {image.get_clim() for image in images[:2]} == {images[0].get_clim()}
    np.testing.assert_allclose(images[1].get_array(), np.log10(scales["3 and 8"]))
    assert png(figure)
    with pytest.raises(ConfigError, match="at least one map"):
        feature_plots.pixel_length_scales({})


def test_curves_end_in_their_last_value():
    figure = feature_plots.accuracy_curves({"cen": [(1, 0.98), (2, 0.9921)], "softmax": [(1, 0.95)]})
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["99.21", "95.00"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["cen", "softmax"]
    assert png(figure)
    with pytest.raises(ConfigError, match="at least one point"):
        feature_plots.accuracy_curves({"cen": []})


def test_last_values_that_meet_are_written_one_below_the_other():
    figure = feature_plots.accuracy_curves({"cen": [(1, 0.5), (2, 0.981)], "softmax": [(1, 0.4), (2, 0.98)]})
    upper, lower = (text.xyann[1] for text in figure.axes[0].texts)
    assert upper - lower >= 10
    apart = feature_plots.accuracy_curves({"cen": [(1, 0.5), (2, 0.98)], "softmax": [(1, 0.4), (2, 0.6)]})
    assert len({text.xyann[1] for text in apart.axes[0].texts}) == 1
