"""Kernel Bayes: sum rule, chain rule and Bayes' rule on embeddings, and a filter for state-space models.

>>> import numpy as np
>>> from kme_dist.models.cme import ConditionalMeanEmbedding
>>> rng = np.random.default_rng(0)
>>> x = rng.normal(0, 2, size=(300, 1))
>>> y = x[:, 0] + rng.normal(size=300)
>>> likelihood = ConditionalMeanEmbedding(solver="cholesky").fit(x, y)      # P(y | x)
>>> prior = rng.normal(1, 1, size=(200, 1))                                 # a sample, equally weighted
>>> marginal = sum_rule(likelihood, prior)                                  # P(y) under the prior: N(1, 2)
>>> bool(abs(marginal.expectation(lambda y: y[:, 0]) - 1) < 0.3)
True
>>> posterior = bayes_rule(likelihood, prior, np.array([3.0]))              # P(x | y = 3): N(2, 1/2)
>>> bool(abs(posterior.expectation(lambda x: x[:, 0]) - 2) < 0.4)
True

A distribution is a `Mean`: points and weights, with `expectation(f)` and `evaluate(X)`. A prior is a `Mean`, a fitted
`KernelMean`, or rows, equally weighted. Weights may be negative: those of embeddings are not probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from kme_dist.backend import blas_threads
from kme_dist.core.bayes import JointMean, TargetFeatures, normalised, posterior_weights
from kme_dist.core.conditional import Delta
from kme_dist.core.kernels import Kernel, OnFeatures, from_config
from kme_dist.core.kernels.base import row_count, select
from kme_dist.core.maps import Dense
from kme_dist.core.means import Mean
from kme_dist.core.pivots import choose_centres
from kme_dist.data.rows import Scaling, check_magnitude, rows_of
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.base import Arrays, Estimator, Facts, Own, scaling_arrays, stored_scaling
from kme_dist.models.cme import ConditionalMeanEmbedding
from kme_dist.models.cme_choice import with_median
from kme_dist.models.means import KernelMean
from kme_dist.models.settings import RandomState, Rule, integer, one_of, positive, seed
from kme_dist.run.conditional import as_targets, padded_solve

__all__ = ["JointMean", "KernelBayesFilter", "Mean", "bayes_rule", "chain_rule", "sum_rule"]

_CENTRES = 300  # targets that Bayes' rule is projected on
_DELTA = 1e-4  # default of δ, for kernels with l(y, y) = 1 and weights that sum to one


def sum_rule(model: ConditionalMeanEmbedding, prior: Any, *, normalise: bool = True) -> Mean:
    """The distribution of Y if X has the prior: Σ_j α_j μ(x̃_j), on the targets of the model.

    `normalise` divides the weights by their sum, which λ shrinks below one. Any solver.
    """
    _check_embedding(model)
    weights = _weights(model, prior, normalise)
    return Mean(model.target_kernel_, model.embedding_.targets, weights)


def chain_rule(model: ConditionalMeanEmbedding, prior: Any, *, normalise: bool = True) -> JointMean:
    """The joint distribution of X and Y if X has the prior, on the pairs that the model was fitted to.

    The marginal of Y is that of the sum rule. The model must have been fitted exactly (solver "cholesky", "tiled" or
    "pcg", without target centres), so that inputs and targets are pairs.
    """
    _check_embedding(model)
    embedding = model._fitted()
    if embedding.centres is None or row_count(embedding.centres) != row_count(embedding.targets):
        raise ConfigError(
            f"a joint distribution needs the pairs of the fit, but solver={model.solver_!r} keeps centres; fit with "
            "solver='cholesky' and target_centres=None"
        )
    weights = _weights(model, prior, normalise)
    kernel, inputs = _in_own_units(model.kernel_, model.scaling_, embedding.centres)
    return JointMean(Mean(kernel, inputs, weights), Mean(model.target_kernel_, embedding.targets, weights))


def bayes_rule(
    model: ConditionalMeanEmbedding,
    prior: Any,
    observation: Any,
    *,
    regularization: float = _DELTA,
    centres: int = _CENTRES,
    normalise: bool = True,
) -> Mean:
    """The distribution of X given an observation of Y: the prior times the likelihood that the model is, normalised.

    Parameters
    ----------
    model : the likelihood, a conditional embedding of Y given X; see `chain_rule` for the solvers.
    observation : one target.
    regularization : δ, relative to the squared mean of l(y, y).   centres : targets that Bayes' rule is projected on.
    """
    positive().check("regularization", regularization)
    integer(1).check("centres", centres)
    joint = chain_rule(model, prior, normalise=True)
    kernel, targets = model.target_kernel_, joint.second.points
    one = np.asarray(observation)[None] if hasattr(targets, "shape") else [observation]
    given = model._query_targets(one, "the observation")
    with blas_threads(1):
        features = _target_features(kernel, targets, centres, model._seed())
        delta = regularization * float(np.mean(kernel.diag(targets))) ** 2
        found = posterior_weights(joint.weights, features.rows(targets), features.rows(given), delta)[:, 0]
    if normalise:
        scaled = normalised(found)
        if scaled is None:
            raise DataError(
                f"observation {observation!r} has no posterior: it is far from all targets under this prior (weights "
                f"sum to {found.sum():.2g}); use a wider target kernel or prior, or normalise=False"
            )
        found = scaled
    return Mean(joint.first.kernel, joint.first.points, found)


def _check_embedding(model: Any) -> None:
    if not isinstance(model, ConditionalMeanEmbedding):
        raise ConfigError(
            f"model must be a fitted ConditionalMeanEmbedding, got a {type(model).__name__}; fit one to the same "
            "pairs: ConditionalMeanEmbedding(solver='cholesky').fit(X, Y)"
        )


def _weights(model: ConditionalMeanEmbedding, prior: Any, normalise: bool) -> np.ndarray:
    """w = W K(X, X̃) α"""
    if isinstance(prior, KernelMean):
        prior = prior.mean_
    points = prior.points if isinstance(prior, Mean) else prior
    a = model.coefficients(points)
    alpha = np.asarray(prior.weights) if isinstance(prior, Mean) else np.full(len(a), 1 / len(a))
    found = np.asarray(a.T @ alpha)
    if not normalise:
        return found
    scaled = normalised(found)
    if scaled is None:
        raise DataError(
            f"the prior is far from all inputs of the model (weights sum to {found.sum():.2g}); fit the model to "
            "inputs that cover the prior, or pass normalise=False"
        )
    return scaled


def _in_own_units(kernel: Kernel, scaling: Scaling | None, centres: Any) -> tuple[Kernel, Any]:
    """Kernel and points for unscaled rows."""
    if scaling is None or (not scaling.shift.any() and (scaling.factor == 1).all()):
        return kernel, centres
    safe = np.where(scaling.factor == 0, 1.0, scaling.factor)
    scaled = Dense(np.diag(scaling.factor), -scaling.shift * scaling.factor, activation="identity")
    return OnFeatures(kernel, scaled), np.asarray(centres) / safe + scaling.shift


def _target_features(kernel: Kernel, targets: Any, centres: int, seed: int) -> TargetFeatures:
    if isinstance(kernel, Delta):
        return TargetFeatures.on(kernel, np.unique(targets))
    if centres >= row_count(targets):
        return TargetFeatures.on(kernel, targets)
    return TargetFeatures.on(kernel, select(targets, choose_centres(kernel, targets, centres, "rpcholesky", seed)))


class KernelBayesFilter(Estimator):
    """States of a hidden process from observations, by kernel Bayes: nothing is assumed but a training sequence.

    The belief at time t is Σ_i α_i k(s_i, ·) over the training states. A step predicts by the sum rule of the
    transitions s_i -> s_{i+1}, then conditions on the observation by Bayes' rule with the likelihood of the pairs
    (s_i, o_i):

        w = (K + nεI)⁻¹ K(S, S₊) (K₋ + (n-1)εI)⁻¹ K(S₋, S) α,     α' = Λ F (M² + δI)⁻¹ M f(o),   M = FᵀΛF, Λ = diag w

    where S₋, S₊ are the states without the last and without the first (Fukumizu, Song and Gretton 2013, section 4.3).

    Parameters
    ----------
    kernel, observation_kernel : of states and of observations; a name has a length scale of `width` times the median.
    transition_regularization, regularization : ε and δ; None chooses those (and `width`, if it is None) that filter the
        last quarter of the training sequence best, with the rest as training sequence.
    width : multiple of the median distance for kernels given by name.
    centres : observations that Bayes' rule is projected on.
    scaling : {"standard", "unit", None} of states and of observations.

    Attributes
    ----------
    states_ : the training states.   kernel_, observation_kernel_ : kernels of the scaled rows.
    transition_regularization_, regularization_, width_ : what was chosen.   scores_ : (width, ε, δ, error) of each try.
    """

    _FITTED: ClassVar[str] = "states_"
    _IN_FACTS: ClassVar[tuple[str, ...]] = (
        "kernel", "observation_kernel", "transition_regularization", "regularization", "width",
    )  # fmt: skip
    _RULES: ClassVar[Mapping[str, Rule]] = {
        "transition_regularization": positive(optional=True),
        "regularization": positive(optional=True),
        "width": positive(optional=True),
        "centres": integer(1),
        "scaling": one_of("standard", "unit", None),
        "random_state": seed(),
    }

    def __init__(
        self,
        kernel: str | Kernel = "gaussian",
        observation_kernel: str | Kernel = "gaussian",
        transition_regularization: float | None = None,
        regularization: float | None = None,
        width: float | None = None,
        centres: int = 100,
        scaling: str | None = "standard",
        random_state: RandomState = 0,
    ) -> None:
        self.kernel = kernel
        self.observation_kernel = observation_kernel
        self.transition_regularization = transition_regularization
        self.regularization = regularization
        self.width = width
        self.centres = centres
        self.scaling = scaling
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False  # two sequences, whose rows depend on each other
        return tags

    def fit(self, states: Any, observations: Any) -> Self:
        """Learn from a sequence: row t of either is the state and the observation at time t."""
        self._begin_fit()
        S, O = self._table(states, "states"), self._table(observations, "observations")
        if len(S) != len(O):
            raise DataError(f"{len(S)} states but {len(O)} observations; the numbers must be equal")
        if len(S) < 8:
            raise DataError(f"a filter requires a training sequence of at least 8 steps, got {len(S)}")
        self._record_columns(observations, O)
        self._record_data(rows_of(O))
        self.scaling_, self.state_scaling_ = Scaling.learn(O, self.scaling), Scaling.learn(S, self.scaling)
        with blas_threads(1):
            chosen = self._choose(S, O)
            self._set(S, O, *chosen)
        return self

    def _choose(self, S: np.ndarray, O: np.ndarray) -> tuple[float, float, float]:
        """Width, ε and δ: those given, or the best of a grid for the last quarter of the sequence."""
        named = isinstance(self.kernel, str) or isinstance(self.observation_kernel, str)
        widths = [self.width or 1.0] if self.width or not named else [0.25, 0.5, 1.0]
        epsilons = [self.transition_regularization] if self.transition_regularization else [1e-6, 1e-4, 1e-2]
        deltas = [self.regularization] if self.regularization else [1e-8, 1e-6, 1e-4, 1e-2]
        grid = [(w, float(e), float(d)) for w in widths for e in epsilons for d in deltas]
        self.scores_: list[tuple[float, float, float, float]] = []
        if len(grid) == 1:
            return grid[0]
        cut = len(S) - max(2, len(S) // 4)
        truth = self.state_scaling_.apply(S[cut:], "float64")
        for width, epsilon, delta in grid:
            self._set(S[:cut], O[:cut], width, epsilon, delta)
            means = self.state_scaling_.apply(self._filtered(O[cut:])[0], "float64")
            self.scores_.append((width, epsilon, delta, float(np.mean((means - truth) ** 2))))
        return min(self.scores_, key=lambda score: score[3])[:3]

    def _set(self, S: np.ndarray, O: np.ndarray, width: float, epsilon: float, delta: float) -> None:
        self.states_, self.observations_ = S, O
        self.width_, self.transition_regularization_, self.regularization_ = width, epsilon, delta
        rows, seen = self.state_scaling_.apply(S, "float64"), self.scaling_.apply(O, "float64")
        self.kernel_ = _with_width(self.kernel, rows, width, self._seed())
        self.observation_kernel_ = _with_width(self.observation_kernel, seen, width, self._seed())
        self._prepare()

    def _prepare(self) -> None:
        """The matrices of a step: P maps the belief to w, F are the features of the training observations."""
        rows = self.state_scaling_.apply(self.states_, "float64")
        n, epsilon = len(rows), self.transition_regularization_ * float(np.mean(self.kernel_.diag(rows)))
        K = np.asarray(self.kernel_.gram(rows), dtype=np.float64)
        onward = padded_solve(K[:-1, :-1] + (n - 1) * epsilon * np.eye(n - 1), K[:-1])  # weights on the next states
        self._P = padded_solve(K + n * epsilon * np.eye(n), K[:, 1:] @ onward)
        seen = self.scaling_.apply(self.observations_, "float64")
        self._features = _target_features(self.observation_kernel_, seen, self.centres, self._seed())
        self._F = self._features.rows(seen)
        self._delta = self.regularization_ * float(np.mean(self.observation_kernel_.diag(seen))) ** 2

    def filter(self, observations: Any, return_weights: bool = False) -> Any:
        """The mean of the state at every time, given the observations up to then.

        With `return_weights` also the beliefs: weights of the training states, a row for each time. The belief before
        the first observation is that of the training sequence; an observation far from all that were seen changes
        nothing.
        """
        self._check_fitted()
        O = self._table(observations, "observations")
        self._check_columns(observations, O)
        check_magnitude(self.scaling_.apply(O, "float64"))
        with blas_threads(1):
            means, weights = self._filtered(O)
        return (means, weights) if return_weights else means

    def predict(self, observations: Any) -> np.ndarray:
        """`filter`, as an estimator."""
        return np.asarray(self.filter(observations))

    def _filtered(self, O: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f = self._features.rows(self.scaling_.apply(O, "float64"))
        n = len(self.states_)
        belief, beliefs = np.full(n, 1 / n), np.empty((len(O), n))
        for t in range(len(O)):
            w = belief if t == 0 else self._P @ belief
            w = self._or(normalised(w, 0.1), belief)
            belief = self._or(normalised(posterior_weights(w, self._F, f[t : t + 1], self._delta)[:, 0], 0.1), w)
            beliefs[t] = belief
        return beliefs @ self.states_, beliefs

    @staticmethod
    def _or(found: np.ndarray | None, otherwise: np.ndarray) -> np.ndarray:
        return otherwise if found is None else found

    @staticmethod
    def _table(rows: Any, name: str) -> np.ndarray:
        found = rows_of(np.asarray(rows)[:, None] if np.ndim(rows) == 1 else rows).read()[0]
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf":
            raise DataError(f"{name} must be numbers, one row for each time")
        return as_targets(found, from_config({"name": "gaussian"}))  # type: ignore[no-any-return]

    # --- storing ---------------------------------------------------------------------------------

    def _pack(self) -> tuple[Arrays, Facts]:
        arrays: Arrays = {"states": self.states_, "observations": self.observations_}
        arrays |= scaling_arrays(self.scaling_) | scaling_arrays(self.state_scaling_, "state_scaling/")
        facts: Facts = {
            "kernel": self.kernel_.to_config(),
            "observation_kernel": self.observation_kernel_.to_config(),
            "transition_regularization": self.transition_regularization_,
            "regularization": self.regularization_,
            "width": self.width_,
        }
        return arrays, facts

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        self.states_, self.observations_ = arrays["states"], arrays["observations"]
        self.scaling_, self.state_scaling_ = stored_scaling(arrays), stored_scaling(arrays, "state_scaling/")
        self.kernel = self.kernel_ = from_config(facts["kernel"], own=own)
        self.observation_kernel = self.observation_kernel_ = from_config(facts["observation_kernel"], own=own)
        for name in ("transition_regularization", "regularization", "width"):
            setattr(self, name, float(facts[name]))
            setattr(self, f"{name}_", float(facts[name]))
        self.n_features_in_, self.scores_ = int(self.observations_.shape[1]), []
        with blas_threads(1):
            self._prepare()


def _with_width(kernel: str | Kernel, rows: np.ndarray, width: float, seed: int) -> Kernel:
    return with_median(from_config({"name": kernel}), rows, width, seed) if isinstance(kernel, str) else kernel
