"""Cholesky, tiled, PCG and nystrom with all rows as centres give one answer: 12 data sets, 6 values of λ.

The answer is taken from an LU factorisation that shares nothing with them. (Nystrom with every row a centre runs the
code of Cholesky, so that these two cannot differ; that it does is part of what is tested.)

Write a = nλ, A = K + aI, and r = Y - A V for what a solver leaves; u = 1.1e-16. A direct solver leaves about
|r| = u |A| |V| <= u (|K| + a)/a |Y|; conjugate gradients leave the tolerance τ that was asked for, which is never less
than that. Decision probabilities then differ from the exact ones by

    K A⁻¹ r            at the rows themselves: at most |r|, since |K A⁻¹| <= 1
    k(x)ᵀ A⁻¹ r        at a new row: at most √k(x, x) |r| / (2√a), since |K^½ A⁻¹| <= 1/(2√a)

so that two solutions agree within twice τ √n max(1, √k(x, x)/(2√a)), however small λ is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from sklearn import datasets

from kme_dist.core.kernels import Gaussian, Laplace, Matern, RationalQuadratic
from kme_dist.core.kernels.base import Kernel
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import Scaling
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.fit import fit_on_dataset

U = 1.1e-16
SHIFTS = (1.0, 1e-2, 1e-4, 1e-5, 1e-6, 1e-8)  # nλ / |K|
SOLVERS = ("cholesky", "tiled", "pcg", "nystrom")
ASKED = 1e-9  # of the residual, where double precision can carry it


@dataclass(frozen=True)
class Case:
    X: np.ndarray
    y: np.ndarray
    new: np.ndarray  # rows that were not fitted
    kernel: Kernel


def case(X, y, rows, kernel, length_scale):
    """The first `rows` of a shuffled table are fitted."""
    X, y = np.asarray(X, dtype=np.float64), np.asarray(y)
    order = np.random.default_rng(0).permutation(len(X))
    fitted, others = order[:rows], order[rows : rows + 40]
    new = X[others] if len(others) else X[fitted] + 0.01 * np.ptp(X, axis=0)
    return Case(X[fitted], y[fitted], new, kernel(length_scale=np.full(X.shape[1], length_scale)))


def grid():
    axis = np.linspace(0, 1, 12)
    X = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    return X, (X[:, 0] + X[:, 1] ** 2 > 0.8).astype(int)


def classification(seed, n=160, **more):
    settings = {"n_features": 6, "n_informative": 4, "n_classes": 3, **more}
    return datasets.make_classification(n, random_state=seed, **settings)


def badly_scaled():
    X, y = classification(1)
    return X * np.logspace(-8, 8, 6), y


def far_away():
    X, y = classification(2)
    return X + 1e6, y


def repeated():
    """Every row three times, now and then with another label, and two features that say nothing."""
    X, y = classification(3, n=40, flip_y=0.2)
    other = classification(3, n=40, flip_y=0.6)[1]
    X = np.column_stack([X, np.full(40, 7.0), np.zeros(40)])
    return np.tile(X, (3, 1)), np.concatenate([y, y, other])


def many_classes():
    return datasets.make_blobs(200, n_features=5, centers=26, random_state=4)


CASES = {
    "iris": lambda: case(*datasets.load_iris(return_X_y=True), 110, Gaussian, 0.5),
    "wine": lambda: case(*datasets.load_wine(return_X_y=True), 120, Matern, 1.0),
    "breast cancer": lambda: case(*datasets.load_breast_cancer(return_X_y=True), 150, Gaussian, 1.0),
    "digits": lambda: case(*datasets.load_digits(return_X_y=True), 150, Gaussian, 2.0),
    "moons": lambda: case(*datasets.make_moons(140, noise=0.2, random_state=0), 100, Gaussian, 0.2),
    "circles": lambda: case(*datasets.make_circles(140, noise=0.05, random_state=0), 100, RationalQuadratic, 0.3),
    "grid without noise": lambda: case(*grid(), 110, Gaussian, 0.3),
    "badly scaled": lambda: case(*badly_scaled(), 120, Laplace, 1.0),
    "far from the origin": lambda: case(*far_away(), 120, Gaussian, 0.7),
    "repeated rows": lambda: case(*repeated(), 100, Gaussian, 0.5),
    "26 classes": lambda: case(*many_classes(), 160, Gaussian, 0.3),
    "12 rows": lambda: case(*datasets.load_iris(return_X_y=True), 12, Gaussian, 0.5),
}


@pytest.fixture(scope="module", params=CASES)
def stored(request, tmp_path_factory):
    found = CASES[request.param]()
    path = tmp_path_factory.mktemp("agreement") / "d.zarr"
    data = ingest((found.X, found.y), path, task="classification", dtype="float64")
    return found, data


@pytest.mark.parametrize("shift", SHIFTS)
def test_exact_solvers_agree(stored, shift, tmp_path):
    given, data = stored
    n, kernel = len(given.X), given.kernel
    executor, scratch = SerialExecutor(), tmp_path / "scratch"

    def fit(solver):
        settings = {"centres": n} if solver == "nystrom" else {"tile_rows": 64} if solver == "tiled" else {}
        return fit_on_dataset(
            data, kernel, a / n, solver=solver, retune=False, dtype="float64", executor=executor, scratch=scratch,
            tolerance=tolerance, **settings,
        )  # fmt: skip

    scaling = Scaling.of(data.split_statistics(None), "unit")
    Z, new = scaling.apply(given.X, "float64"), scaling.apply(given.new, "float64")
    K = kernel.gram(Z)
    norm = np.linalg.norm(K, 2)
    a = shift * norm
    tolerance = max(ASKED, 20 * U * (norm + a) / a)
    Y = (given.y[:, None] == np.asarray(sorted(set(given.y)))).astype(np.float64)
    bounds = 2 * tolerance * np.sqrt(n) * np.array([1.0, max(1.0, kernel.alpha(Z) / (2 * np.sqrt(a)))])
    V_exact = np.linalg.solve(K + a * np.eye(n), Y)
    exact = [kernel.gram(rows, Z) @ V_exact for rows in (Z, new)]
    for solver in SOLVERS:
        found = fit(solver)
        V = found.embedding.weights
        assert found.solver == solver
        left = np.linalg.norm(Y - K @ V - a * V) / np.linalg.norm(Y)
        assert left <= tolerance, f"{solver}: residual {left:.1e}"
        assert found.residual <= tolerance
        P = [found.embedding.decision(rows) for rows in (Z, new)]
        for mine, wanted, bound in zip(P, exact, bounds, strict=True):
            apart = np.abs(mine - wanted).max() / np.abs(wanted).max()
            assert apart <= bound, f"{solver}: apart by {apart:.1e}"
