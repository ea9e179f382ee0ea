"""Density estimation by kernel mean matching: the mixture of Gaussians whose kernel mean is nearest.   [KMSE, 6.2.2]

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> X = np.concatenate([rng.normal(-2, 0.5, size=(100, 1)), rng.normal(2, 1.0, size=(100, 1))])
>>> fit = MixtureMatching(2, estimator="b-kmse").fit(X)
>>> [round(float(m)) for m in np.sort(fit.means_[:, 0])]
[-2, 2]
>>> fit.score_samples(X[:3]).shape
(3,)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from scipy.optimize import minimize
from scipy.special import softmax
from sklearn.base import DensityMixin
from sklearn.cluster import KMeans

from kme_dist.backend import blas_threads
from kme_dist.core.density import Gaussians, Overlap, check_kernel, log_density, matching_loss, overlap
from kme_dist.core.kernels import Kernel, from_config
from kme_dist.core.means import ESTIMATORS
from kme_dist.data.rows import RowsRef, check_magnitude, rows_of
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.base import Arrays, Estimator, Facts, Own, on_workers
from kme_dist.models.means import checked_matrix, kernel_for
from kme_dist.models.settings import RandomState, Rule, drawn_seed, integer, jobs, one_of, seed
from kme_dist.run.executors import Executor
from kme_dist.run.means import BLOCK_ROWS, FittedMean, fit_mean

_START_ROWS = 5_000  # rows for the initial clusters
_ROWS = 1_024  # densities are computed for at a time


class MixtureMatching(DensityMixin, Estimator):  # type: ignore[misc]
    """A mixture of Gaussians with diagonal or isotropic covariances, matched to an estimate of the kernel mean.

    Parameters
    ----------
    n_components : number of Gaussians.
    kernel : a Gaussian, linear, or polynomial kernel of degree 2 or 3; a name gets the median distance as length scale.
        A linear kernel depends only on means, one of degree 2 on the first two moments: what the kernel does not depend
        on stays as in the initial clusters.
    estimator : the mean to match: "kme", "b-kmse", "r-kmse" or "s-kmse". (A shrunk mean has weights with the
        common factor 1 - α; the mixture, whose shares add up to one, is the nearest one to it.)
    covariance : "diagonal" (a variance for each feature of a component) or "isotropic" (one for each component, as in
        the paper; features should have similar units).
    matched : "all" (shares, means and variances), or "shares" of the initial clusters, whose means and variances stay:
        a convex problem of n_components numbers, for which one pass over the rows suffices.
    starts : number of initial clusterings; the best fit is kept.   client, random_state, n_jobs : as in KernelMean.

    Attributes
    ----------
    shares_, means_, variances_ : of the Gaussians.   loss_ : |μ_mixture - μ̂|² up to a constant.
    """

    _FITTED: ClassVar[str] = "shares_"
    _IN_FACTS: ClassVar[tuple[str, ...]] = ("n_components", "kernel", "estimator", "covariance", "matched")
    _RULES: ClassVar[Mapping[str, Rule]] = {
        "n_components": integer(1),
        "estimator": one_of(*ESTIMATORS),
        "covariance": one_of("diagonal", "isotropic"),
        "matched": one_of("all", "shares"),
        "starts": integer(1),
        "random_state": seed(),
        "n_jobs": jobs(),
    }

    def __init__(
        self,
        n_components: int = 10,
        kernel: str | Kernel = "gaussian",
        estimator: str = "kme",
        starts: int = 3,
        client: Any = None,
        random_state: RandomState = 0,
        n_jobs: int | None = None,
        covariance: str = "diagonal",
        matched: str = "all",
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.estimator = estimator
        self.starts = starts
        self.client = client
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.covariance = covariance
        self.matched = matched

    @on_workers
    def fit(self, X: Any, y: Any = None) -> Self:
        """Match the rows of an array or of a data set; every evaluation of the loss is one pass over the rows (of the
        shares alone: one pass in all)."""
        self._begin_fit()
        sample = rows_of(checked_matrix(X))
        if not sample.source.features:
            raise DataError(
                "MixtureMatching takes rows of numbers: its components are Gaussians; encode the rows first"
            )
        self._record_columns(X, sample.read()[0] if sample.in_memory else None)
        self._record_data(sample)
        if self.n_components > sample.count:
            raise ConfigError(f"n_components={self.n_components}: must be at most {sample.count}, the number of rows")
        self.kernel_ = check_kernel(kernel_for(self.kernel, sample, self._seed()))
        executor = self._executor()
        target = fit_mean(self.kernel_, sample, self.estimator, executor=executor)
        rows = np.asarray(sample.sample(_START_ROWS, self._seed())[0])
        with blas_threads(1):
            fits = [
                self._matched(target, _clusters(rows, self.n_components, self._seed() + start), executor)
                for start in range(self.starts)
            ]
        self.loss_, self.shares_, mixture = min(fits, key=lambda found: found[0])
        self.means_, self.variances_ = mixture.means, mixture.covariances
        return self

    def _matched(
        self, target: FittedMean, start: tuple[np.ndarray, Gaussians], executor: Executor
    ) -> tuple[float, np.ndarray, Gaussians]:
        shares, mixture = start
        k, d = mixture.means.shape
        variances = mixture.covariances
        if self.covariance == "isotropic":
            variances = variances.mean(axis=1, keepdims=True)  # one column, the same for all features
        spread, width = variances.mean(axis=0), variances.shape[1]

        def unpack(theta: np.ndarray) -> tuple[np.ndarray, Gaussians]:
            logits, means, logs = np.split(theta, [k, k + k * d])
            variances = np.exp(np.clip(logs.reshape(k, width), -12, 12)) * spread
            return np.asarray(softmax(logits)), Gaussians(means.reshape(k, d), np.repeat(variances, d // width, axis=1))

        theta = np.concatenate([np.log(shares), mixture.means.ravel(), np.log(variances / spread).ravel()])
        fixed = _overlap(self.kernel_, unpack(theta)[1], target, executor) if self.matched == "shares" else None

        def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
            shares, mixture = unpack(np.concatenate([free, theta[len(free) :]]))
            h = fixed or _overlap(self.kernel_, mixture, target, executor)
            value, (by_share, by_mean, by_variance) = matching_loss(self.kernel_, shares, mixture, h)
            by_logit = shares * (by_share - shares @ by_share)
            by_log = (by_variance * mixture.covariances).reshape(k, width, d // width).sum(axis=2)
            return value, np.concatenate([by_logit, by_mean.ravel(), by_log.ravel()])[: len(free)]

        free = theta if fixed is None else theta[:k]
        found = minimize(loss, free, jac=True, method="L-BFGS-B", options={"maxiter": 300})
        return float(found.fun), *unpack(np.concatenate([found.x, theta[len(free) :]]))

    def score_samples(self, X: Any) -> np.ndarray:
        """log density of every row."""
        self._check_fitted()
        rows, _ = rows_of(X).read()
        self._check_columns(X, rows)
        check_magnitude(rows, scaled=False)
        mixture = Gaussians(self.means_, self.variances_)
        parts = [log_density(rows[i : i + _ROWS], self.shares_, mixture) for i in range(0, len(rows), _ROWS)]
        return np.concatenate(parts)

    def score(self, X: Any, y: Any = None) -> float:
        """Mean log density of the rows."""
        return float(self.score_samples(X).mean())

    def sample(self, size: int, random_state: RandomState = None) -> np.ndarray:
        """Rows drawn from the mixture; None draws the same rows every time."""
        self._check_fitted()
        rng = np.random.default_rng(self._seed() if random_state is None else drawn_seed(random_state))
        parts = rng.choice(len(self.shares_), size=size, p=self.shares_)
        noise = rng.standard_normal((size, self.means_.shape[1]))
        return np.asarray(self.means_[parts] + noise * np.sqrt(self.variances_[parts]))

    def _pack(self) -> tuple[Arrays, Facts]:
        mixture = {"shares": self.shares_, "means": self.means_, "variances": self.variances_}
        return mixture, {
            "kernel": self.kernel_.to_config(),
            "estimator": self.estimator,
            "covariance": self.covariance,
            "matched": self.matched,
            "loss": self.loss_,
        }

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        self.kernel = self.kernel_ = from_config(facts["kernel"], own=own)
        self.estimator, self.loss_ = facts["estimator"], float(facts["loss"])
        self.covariance, self.matched = facts.get("covariance", "diagonal"), facts.get("matched", "all")
        self.shares_, self.means_, self.variances_ = (arrays[name] for name in ("shares", "means", "variances"))
        self.n_components, self.n_features_in_ = len(self.shares_), int(self.means_.shape[1])


def _clusters(rows: np.ndarray, k: int, seed: int) -> tuple[np.ndarray, Gaussians]:
    """Shares, means and variances of k-means clusters, regularised by the overall variance."""
    overall = rows.var(axis=0) + 1e-9 * (1 + np.abs(rows).max())
    found = KMeans(k, n_init=1, random_state=seed).fit(rows)
    counts = np.bincount(found.labels_, minlength=k)
    squares = np.stack(
        [np.sum((rows[found.labels_ == i] - c) ** 2, axis=0) for i, c in enumerate(found.cluster_centers_)]
    )
    variances = (squares + overall) / (counts[:, None] + 1)
    return (counts + 1.0) / (counts.sum() + k), Gaussians(np.asarray(found.cluster_centers_, np.float64), variances)


def _block_overlap(kernel: Kernel, mixture: Gaussians, block: RowsRef, weights: np.ndarray | float) -> Overlap:
    X = np.asarray(block.read()[0], dtype=np.float64)
    return overlap(kernel, mixture, X, np.broadcast_to(np.asarray(weights, dtype=np.float64), (len(X),)))


def _overlap(kernel: Kernel, mixture: Gaussians, target: FittedMean, executor: Executor) -> Overlap:
    calls, at = [], 0
    for block in target.rows.parts(BLOCK_ROWS):
        own = target.weights if np.ndim(target.weights) == 0 else np.asarray(target.weights)[at : at + len(block)]
        calls.append((kernel, mixture, block, own))
        at += len(block)
    return executor.map_reduce(_block_overlap, calls, Overlap.plus, name="matching")
