"""Pictures of learned features: drawn without a window, with what they promise in them."""

from __future__ import annotations

import io

import numpy as np
import pytest

from kme_dist import feature_plots
from kme_dist.core import features as maps
from kme_dist.errors import ConfigError


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
