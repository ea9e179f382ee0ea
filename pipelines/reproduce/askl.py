"""Table 2 of Li, Liu and Wang: accuracy and RMSE of automated spectral kernel learning.

Random splits of 80/20. Features standardised with the training part, regression targets scaled to [0, 100] before RMSE
is taken; multiclass hinge loss, squared loss for regression, Adam at rate 0.01 with cosine decay, batches of 32, ten
epochs or 1500 steps if that is more, λ₁ = λ₂ = 1e-4, one phase for both sets of frequencies (equation 6 prints two,
with which the kernel is stationary). One thing is tuned, the deviation of the frequencies, on a fifth of the training
part of each split; test rows are never looked at. The paper's own settings were chosen on the test rows by its public
code, so its figures are a bar to pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.model_selection import train_test_split

from kme_dist import ASKLClassifier, ASKLRegressor

if TYPE_CHECKING:
    from kme_dist.pipelines.reproduce.folds import Fold

REGRESSION = ("abalone", "space_ga", "cpusmall", "cadata")
DEVIATIONS = (0.25, 0.5, 1.0)


def table_2(fold: Fold, X: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Accuracy in per cent, or RMSE of targets between 0 and 100, on the test rows of a split."""
    X, regression = X.astype(np.float64), fold.row in REGRESSION
    if regression:
        y = 100 * (y.astype(np.float64) - y.min()) / np.ptp(y)
    variant, frequencies = fold.method.lower(), int(fold.settings["frequencies"])
    X, Xq, y, yq = train_test_split(X, y, test_size=0.2, random_state=fold.fold)

    def evaluate(deviation: float, *rows: np.ndarray) -> float:
        return fit_and_score(regression, variant, frequencies, deviation, *rows)

    part, held, y_part, y_held = train_test_split(X, y, test_size=0.2, random_state=1)
    tried = [evaluate(deviation, part, y_part, held, y_held) for deviation in DEVIATIONS]
    deviation = DEVIATIONS[int(np.argmin(tried) if regression else np.argmax(tried))]
    return {"value": evaluate(deviation, X, y, Xq, yq), "deviation": deviation}


def fit_and_score(
    regression: bool,
    variant: str,
    frequencies: int,
    deviation: float,
    X: np.ndarray,
    y: np.ndarray,
    Xq: np.ndarray,
    yq: np.ndarray,
) -> float:
    epochs = max(10, -(-1500 * 32 // len(y)))
    options: dict[str, Any] = {"variant": variant, "deviation": deviation, "features": frequencies, "epochs": epochs}
    if not regression:
        return float(100 * ASKLClassifier(**options).fit(X, y).score(Xq, yq))
    model = ASKLRegressor(**options).fit(X, y)
    return float(np.sqrt(np.mean((model.predict(Xq) - yq) ** 2)))
