"""Table 2 of Li, Liu and Wang: accuracy and RMSE of automated spectral kernel learning.

Random splits of 80/20. Features standardised with the training part, regression targets scaled to [0, 100] before RMSE
is taken; multiclass hinge loss, squared loss for regression, Adam at rate 0.01 with cosine decay, batches of 32, ten
epochs or 1500 steps if that is more, λ₁ = λ₂ = 1e-4, 500 frequencies (the paper: 2000), one phase for both sets of
frequencies (equation 6 prints two, with which the kernel is stationary). One thing is tuned, the deviation of the
frequencies, on a fifth of the training part of the first split, apart for drawn ("nsk") and for learned frequencies
("askl"); test rows are never looked at. The paper's own settings were chosen on the test rows by its public code, so
its figures are a bar to pass.
"""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from kme_dist import ASKLClassifier, ASKLRegressor, backend

pytestmark = [pytest.mark.paper, pytest.mark.shared_data, pytest.mark.timeout(4 * 3600)]

VARIANTS = ("sk", "nsk", "skl", "nskl", "askl")
ACCURACY = {"segment": 95.02, "satimage": 85.32, "pendigits": 99.06}
RMSE = {"abalone": 7.88, "space_ga": 11.34, "cadata": 46.34}
DEVIATIONS = (0.25, 0.5, 1.0)
SPLITS = 2


def fit_and_judge(name, variant, deviation, X, y, Xq, yq):
    """Accuracy in per cent, or RMSE of targets between 0 and 100; larger is better for one, smaller for the other."""
    epochs = max(10, -(-1500 * 32 // len(y)))
    options = {"variant": variant, "deviation": deviation, "features": 500, "epochs": epochs}
    if name in ACCURACY:
        return 100 * ASKLClassifier(**options).fit(X, y).score(Xq, yq)
    model = ASKLRegressor(**options).fit(X, y)
    return float(np.sqrt(np.mean((model.predict(Xq) - yq) ** 2)))


def tuned_deviation(name, variant, X, y):
    part, held, y_part, y_held = train_test_split(X, y, test_size=0.2, random_state=1)
    scores = [fit_and_judge(name, variant, deviation, part, y_part, held, y_held) for deviation in DEVIATIONS]
    return DEVIATIONS[int(np.argmax(scores) if name in ACCURACY else np.argmin(scores))]


def table_row(name, X, y, variants=VARIANTS, splits=SPLITS):
    X = X.astype(np.float64)
    if name in RMSE:
        y = 100 * (y.astype(np.float64) - y.min()) / np.ptp(y)
    parts = [train_test_split(X, y, test_size=0.2, random_state=seed) for seed in range(splits)]
    found = {}
    with backend.blas_threads(1):
        widths = {}
        for variant in reversed(variants):
            kind = "askl" if variant in ("skl", "nskl", "askl") else "nsk"
            if kind not in widths:
                widths[kind] = tuned_deviation(name, kind, parts[0][0], parts[0][2])
            deviation = widths[kind]
            scores = [fit_and_judge(name, variant, deviation, X, y, Xq, yq) for X, Xq, y, yq in parts]
            found[variant] = float(np.mean(scores))
            print(f"{name} {variant}: {found[variant]:.2f} +- {np.std(scores):.2f} (deviation {deviation})", flush=True)
    return found


@pytest.mark.parametrize("name", [*ACCURACY, *RMSE])
def test_spectral_kernels_pass_the_published_figure(name, shared_data):
    X, y = shared_data(name)
    found = table_row(name, X, y)
    if name in ACCURACY:
        assert found["askl"] >= ACCURACY[name]
    else:
        assert found["askl"] <= RMSE[name]
        # Two of the printed figures are above what a constant reaches; half the variance is a bar that says something.
        assert found["askl"] < np.sqrt(0.5) * 100 * y.std() / np.ptp(y)
