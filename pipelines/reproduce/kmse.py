"""Muandet, Sriperumbudur, Fukumizu, Gretton and Schölkopf, Kernel Mean Shrinkage Estimators.

Section 6.1: loss |μ - μ_P|² of the estimators on mixtures of four Gaussians, known in closed form. Table 1: error of
the Parzen-window classifier over 100 splits with 30 % held out, features standardised, width from a uniform grid over
[0.1, 2], all choices made inside the training part. Table 2: negative log-likelihood of mixtures of ten Gaussians,
fitted by kernel mean matching. Table 3: support measure machines; the paper's data are not available, others stand in.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from kme_dist import MixtureMatching, OneClassSupportMeasure, ParzenClassifier, SupportMeasureClassifier
from kme_dist.core.density import Gaussians, inner_products
from kme_dist.core.kernels.base import median_length_scale
from kme_dist.core.means import ESTIMATORS, gram_weights
from kme_dist.kernels import Gaussian, Linear, Polynomial

if TYPE_CHECKING:
    from kme_dist.pipelines.reproduce.folds import Fold

HELD_OUT = 0.3
WIDTHS = np.linspace(0.1, 2.0, 20)
MOST_ROWS = 1_000  # of a data set in one randomisation of table 2
BAG_ROWS, BAGS = 4, 20  # rows of a bag, bags of a class for training and for testing


def table_1(fold: Fold, X: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Error of the Parzen-window classifier on the test rows of a split."""
    train, test = train_test_split(np.arange(len(y)), test_size=HELD_OUT, random_state=fold.fold)
    clf = ParzenClassifier(fold.method.lower(), length_scales=WIDTHS, random_state=fold.fold)
    return {"value": 1 - clf.fit(X[train], y[train]).score(X[test], y[test])}


# --- table 2 ---------------------------------------------------------------------------------------------


def table_2(fold: Fold, X: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Negative log-likelihood of held-out rows under a mixture of ten isotropic Gaussians: the shares of k-means
    clusters are matched to the kernel mean, for each of 50 clusterings, and the nearest mixture is kept. At most
    MOST_ROWS rows."""
    kernel_name, estimator = fold.method.split()
    train, test = density_split(X, fold.fold)
    kernel = {"LIN": Linear(), "POLY2": Polynomial(degree=2), "RBF": "gaussian"}[kernel_name]
    starts = int(fold.settings["starts"])
    fit = MixtureMatching(
        10, kernel, estimator.lower(), starts, random_state=fold.fold, covariance="isotropic", matched="shares"
    ).fit(train)
    return {"value": -fit.score(test)}


def density_split(X: np.ndarray, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows of randomisation i, standardised by the training part."""
    rows = np.random.default_rng(i).permutation(len(X))[:MOST_ROWS]
    train, test = (X[part].astype(np.float64) for part in train_test_split(rows, test_size=HELD_OUT, random_state=i))
    varies = train.std(axis=0) > 0
    shift, width = train.mean(axis=0)[varies], train.std(axis=0)[varies]
    return (train[:, varies] - shift) / width, (test[:, varies] - shift) / width


# --- table 3 ---------------------------------------------------------------------------------------------


def table_3(fold: Fold, X: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Accuracy of a support measure machine, or AUC of a one-class one, on bags of four pixels' spectra of one kind of
    ground (satimage). C = 10, nu = 0.1, widths are median distances; nothing is tuned."""
    task, level = fold.row.split(", ")
    X = ((X - X.mean(axis=0)) / X.std(axis=0)).astype(np.float64)
    classes = np.unique(y)
    train, test = bags_of(X, y, classes, np.random.default_rng(fold.fold))
    options: dict[str, Any] = {"estimator": fold.method.lower(), "level": level}
    bags, labels = [bag for bag, _ in test], [c for _, c in test]
    if task == "SMM accuracy":
        clf = SupportMeasureClassifier(C=10.0, **options).fit([bag for bag, _ in train], [c for _, c in train])
        return {"value": clf.score(bags, labels)}
    usual = classes[fold.fold % len(classes)]
    one = OneClassSupportMeasure(**options).fit([bag for bag, c in train if c == usual])
    return {"value": roc_auc_score([c == usual for c in labels], one.decision_function(bags))}


def bags_of(X: np.ndarray, y: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """BAGS bags of each class for training and as many for testing, no row in two of them."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for c in classes:
        rows = rng.permutation(np.flatnonzero(y == c))[: 2 * BAGS * BAG_ROWS].reshape(2, BAGS, BAG_ROWS)
        for part, chosen in zip(parts, rows, strict=True):
            part += [(X[bag], c) for bag in chosen]
    return parts


# --- section 6.1 -------------------------------------------------------------------------------------------


def figures(fold: Fold, X: None, y: None) -> dict[str, Any]:
    """By how many per cent the loss of a shrinkage estimator is below that of the plain mean, on one distribution.

    A row is KERNEL, n = ROWS, d = FEATURES. All estimators and all numbers of rows see the same distributions.
    """
    kernel_name, rows, features = fold.row.split(", ")
    n, d = (int(part.rpartition(" ")[2]) for part in (rows, features))
    rng = np.random.default_rng([fold.fold, d])
    shares, mixture = random_mixture(rng, d)
    rng = np.random.default_rng([fold.fold, d, n, zlib.crc32(kernel_name.encode())])
    losses = mean_losses(kernel_name, shares, mixture, n, int(fold.settings["samples"]), rng)
    plain, shrunk = losses[0], losses[ESTIMATORS.index(fold.method.lower())]
    return {"value": 100 * (plain - shrunk) / plain, "plain": plain, "shrunk": shrunk}


def random_mixture(rng: np.random.Generator, d: int = 30) -> tuple[np.ndarray, Gaussians]:
    """The mixture of section 6.1.2, whose text it agrees with.

    Exactly what is used: four Gaussians with shares 0.05, 0.3, 0.4, 0.25; each coordinate of each mean uniform on
    [-10, 10]; each covariance Wishart with scale matrix 2I and 7 degrees of freedom (so of rank 7), plus 0.2 I, which
    is independent noise of variance 0.2.
    """
    shares = np.array([0.05, 0.3, 0.4, 0.25])
    means = rng.uniform(-10, 10, size=(4, d))
    roots = rng.normal(0, np.sqrt(2), size=(4, 7, d))
    covariances = np.einsum("kia,kib->kab", roots, roots) + 0.2 * np.eye(d)
    return shares, Gaussians(means, covariances)


def draw(shares: np.ndarray, mixture: Gaussians, n: int, rng: np.random.Generator) -> np.ndarray:
    parts = rng.choice(len(shares), size=n, p=shares)
    means, covariances = np.asarray(mixture.means), np.asarray(mixture.covariances)
    return np.stack([rng.multivariate_normal(means[k], covariances[k]) for k in parts])


def mean_losses(
    kernel_name: str, shares: np.ndarray, mixture: Gaussians, n: int, samples: int, rng: np.random.Generator
) -> list[float]:
    """|μ - μ_P|² of every estimator, the mean over samples of n rows; RBF has the median distance of the sample."""
    losses = np.zeros(len(ESTIMATORS))
    fixed: dict[str, Any] = {"LIN": Linear(), "POLY2": Polynomial(degree=2), "POLY3": Polynomial(degree=3)}
    for _ in range(samples):
        X = draw(shares, mixture, n, rng)
        kernel = fixed.get(kernel_name) or Gaussian(length_scale=median_length_scale(X, 0))
        K = np.asarray(kernel.gram(X))
        at_rows = inner_products(kernel, Gaussians.points(X), mixture) @ shares
        norm = shares @ inner_products(kernel, mixture, mixture) @ shares
        for j, estimator in enumerate(ESTIMATORS):
            weights = gram_weights(estimator, K).weights
            losses[j] += (weights @ K @ weights - 2 * weights @ at_rows + norm) / samples
    return losses.tolist()
