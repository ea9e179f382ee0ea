"""A tile that the memory of a device cannot hold (row 23): half of it is computed at a time; what cannot be halved is
refused with the setting to change. The device is the strict stand-in for CuPy, with an allocator that refuses large
arrays: a real GPU has not been tried."""

import numpy as np
import pytest
import strict_cupy

from kme_dist.core.embedding import Decision, Embedding
from kme_dist.core.kernels import Gaussian
from kme_dist.core.kernels.base import tiles_that_fit
from kme_dist.core.sums import Centres, OneHot, sum_rows
from kme_dist.errors import ConfigError
from kme_dist.models.mce import MCEClassifier


@pytest.fixture
def table(rng):
    X = rng.normal(size=(300, 3))
    return X, (X[:, 0] > 0).astype(int)


@pytest.fixture
def largest(monkeypatch):
    """Sets the largest array, in bytes, that the device can allocate."""
    return lambda size: monkeypatch.setattr(strict_cupy, "largest_allocation", size)


@pytest.mark.chaos(23)
def test_a_tile_is_halved_until_it_fits():
    tried = []

    def compute(part):
        tried.append(part.stop - part.start)
        if tried[-1] > 30:
            raise MemoryError("too large")
        return list(range(part.start, part.stop))

    found = list(tiles_that_fit(compute, 150, 100))
    assert [part for part, _ in found] == [slice(at, min(150, at + 25)) for at in range(0, 150, 25)]
    assert [row for _, rows in found for row in rows] == list(range(150))
    assert tried == [100, 50, *[25] * 6], "the size that fits is kept"


@pytest.mark.chaos(23)
def test_other_errors_are_not_tried_again():
    def compute(part):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(tiles_that_fit(compute, 150, 100))


@pytest.mark.chaos(23)
def test_decisions_are_the_same_in_smaller_tiles(table, device, largest):
    X, y = table
    weights = np.eye(2)[y] / len(y)
    expected = Embedding(Gaussian(), X, weights, 1.0).decision(X)
    decide = Decision(Embedding(Gaussian(), device(X), device(weights), 1.0), "float64")
    rows = device(X)
    largest(100 * 300 * 8)  # a tile of all 300 rows is three times as large
    np.testing.assert_allclose(device.host(decide(rows)), expected, rtol=1e-12)


@pytest.mark.chaos(23)
def test_no_row_is_counted_twice_when_sums_are_made_in_smaller_tiles(table, device, largest):
    X, y = table
    expected = sum_rows(Centres(Gaussian(), X[:40]), X, y, OneHot(2))
    basis, rows = Centres(Gaussian(), device(X[:40])), device(X)
    largest(60 * 40 * 8)  # a tile of all 300 rows is five times as large
    found = sum_rows(basis, rows, y, OneHot(2))
    assert found.rows == 300
    np.testing.assert_allclose(device.host(found.G), np.tril(expected.G) + np.tril(expected.G, -1).T, rtol=1e-12)
    np.testing.assert_allclose(device.host(found.B), expected.B, rtol=1e-12)


@pytest.mark.chaos(23)
def test_a_few_rows_that_are_too_many_are_refused_with_the_remedy(table, device, largest):
    X, y = table
    decide = Decision(Embedding(Gaussian(), device(X), device(np.eye(2)[y]), 1.0), "float64")
    rows = device(X)
    largest(1000)
    with pytest.raises(ConfigError, match=r"a tile of \d+ rows: out of memory .*; use fewer centres"):
        decide(rows)


@pytest.mark.chaos(23)
def test_a_batch_that_is_too_large_is_refused_with_the_setting_to_change(table, device, largest):
    X, y = table
    largest(200 * 200 * 4)
    with pytest.raises(ConfigError, match=r"a batch of \d+ rows: out of memory .*; set `batch_size` lower"):
        MCEClassifier(steps=3, batch_size=256, backend="cupy").fit(X, y)
