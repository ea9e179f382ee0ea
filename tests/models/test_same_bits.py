"""A model that comes back from disk gives the same bits, whichever processor the linear algebra is written for.

A matrix product takes another path, and rounds otherwise, when a factor lies by columns instead of by rows (weights do,
as LAPACK solves for them). Stored arrays come back in the memory order they had, so nothing is left to tolerate.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits

import kme_dist as kme
from kme_dist.kernels import Gaussian, Matern

DIGITS = load_digits(return_X_y=True)
WIDE = Gaussian(length_scale=np.full(64, 2.5))
KNOWN = {"kernel": WIDE, "steps": 0, "regularization": 1e-5}  # weights large enough for rounding to show
MODELS = {
    "mce": lambda: kme.MCEClassifier(**KNOWN),
    "mce, double": lambda: kme.MCEClassifier(dtype="float64", **KNOWN),
    "mce, nystrom": lambda: kme.MCEClassifier(solver="nystrom", centres=150, **KNOWN),
    "mce, pcg": lambda: kme.MCEClassifier(solver="pcg", **{**KNOWN, "regularization": 1e-3}),
    "mce, tiled": lambda: kme.MCEClassifier(solver="tiled", **{**KNOWN, "regularization": 1e-3}),
    "mce, learned": lambda: kme.MCEClassifier(kernel="matern", objective="rcb", steps=3, batch_size=100),
    "mce, temperature": lambda: kme.MCEClassifier(calibration="temperature", **KNOWN),
    "mce, isotonic": lambda: kme.MCEClassifier(calibration="isotonic", **KNOWN),
    "mce, on features": lambda: kme.MCEClassifier(
        kernel="linear", features={"name": "spectral", "features": 80}, steps=0, regularization=1e-5
    ),
    "cen": lambda: kme.CENClassifier(hidden=(32, 16), steps=5, regularization=1e-4),
    "cen, kernel head": lambda: kme.CENClassifier(hidden=(16, 8), head="gaussian", steps=3, regularization=1e-4),
    "askl": lambda: kme.ASKLClassifier(features=100, epochs=1, loss="cross_entropy"),
    "askl, printed form": lambda: kme.ASKLClassifier(features=100, epochs=1, loss="cross_entropy", form="independent"),
}


def same(model, again, X):
    for rows in (X, X[:1], X[:7], np.asfortranarray(X)):
        assert again.predict_proba(rows).tobytes() == model.predict_proba(rows).tobytes()
        assert again.decision_function(rows).tobytes() == model.decision_function(rows).tobytes()
        np.testing.assert_array_equal(again.predict(rows), model.predict(rows))


@pytest.mark.parametrize("name", MODELS)
def test_a_classifier_comes_back_to_the_bit(name, tmp_path):
    X, y = DIGITS
    model = MODELS[name]().fit(X[:400], y[:400])
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    same(model, again, X[400:900])
    if hasattr(model, "expectation"):
        g = np.arange(10.0)
        assert again.expectation(X[400:], g).tobytes() == model.expectation(X[400:], g).tobytes()
    again.save(tmp_path / "copy.zarr")  # and once more
    same(model, kme.load(tmp_path / "copy.zarr"), X[400:500])


def test_a_compressed_model_comes_back_to_the_bit(tmp_path):
    X, y = DIGITS
    small = kme.MCEClassifier(**KNOWN).fit(X[:400], y[:400]).compress(n_centres=120)
    small.save(tmp_path / "model.zarr")
    same(small, kme.load(tmp_path / "model.zarr"), X[400:900])


def test_a_regressor_comes_back_to_the_bit(tmp_path):
    X, y = load_diabetes(return_X_y=True)
    model = kme.ASKLRegressor(features=100, epochs=2).fit(X, y)
    model.save(tmp_path / "model.zarr")
    assert kme.load(tmp_path / "model.zarr").predict(X).tobytes() == model.predict(X).tobytes()


@pytest.mark.parametrize("estimator", ["kme", "b-kmse", "r-kmse", "s-kmse"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_kernel_mean_comes_back_to_the_bit(estimator, order, tmp_path):
    X = np.asarray(DIGITS[0] / 16, order=order)
    for kernel in (Gaussian(2.0), Matern(nu=1.5, length_scale=2.0)):
        mean = kme.KernelMean(estimator, kernel).fit(X[:300])
        mean.save(tmp_path / "mean.zarr")
        again = kme.load(tmp_path / "mean.zarr")
        assert again.evaluate(X[300:700]).tobytes() == mean.evaluate(X[300:700]).tobytes()
        assert again.weights_.tobytes() == mean.weights_.tobytes()


@pytest.mark.parametrize("core", ["HASWELL", "SKYLAKEX", "ZEN", "SANDYBRIDGE"])
def test_the_same_bits_on_processors_of_several_kinds(core, tmp_path):
    """OpenBLAS takes the paths of the processor it is told to be on; where that one is missing it takes its own."""
    if core == "SKYLAKEX" and "avx512f" not in _processor():
        pytest.skip("this processor lacks the instructions of SKYLAKEX")
    script = (
        "import numpy as np, kme_dist as kme, test_same_bits as t; from pathlib import Path\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "for name in ('mce', 'mce, isotonic', 'cen', 'cen, kernel head', 'askl'):\n"
        "    (folder / name).mkdir(); t.test_a_classifier_comes_back_to_the_bit(name, folder / name)\n"
        "t.test_a_kernel_mean_comes_back_to_the_bit('s-kmse', 'F', folder)\n"
    )
    here = os.path.dirname(__file__)
    environment = {**os.environ, "OPENBLAS_CORETYPE": core, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as facts:
            return facts.read()
    except OSError:
        return ""
