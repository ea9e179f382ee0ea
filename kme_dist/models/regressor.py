"""The conditional mean embedding as a regressor: kernel and λ learned, means with deviations, intervals and samples.

>>> from sklearn.datasets import load_diabetes
>>> X, y = load_diabetes(return_X_y=True)
>>> model = CMERegressor().fit(X[::2], y[::2])
>>> mean, std = model.predict(X[1::2], return_std=True)
>>> low, high = model.predict_interval(X[1::2], coverage=0.9)       # jackknife+, no refits
>>> bool(((low < y[1::2]) & (y[1::2] < high)).mean() > 0.8)
True
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import RegressorMixin

from kme_dist.backend import astype, blas_threads, free_bytes
from kme_dist.core import kernels
from kme_dist.core.embedding import HOST_TILE, Decision, Embedding
from kme_dist.core.intervals import LeftOut, Near, Predictive
from kme_dist.core.kernels import Kernel, Matern
from kme_dist.core.kernels.base import row_blocks
from kme_dist.core.risk import positive_rows
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.frames import split_target
from kme_dist.data.ingest import positive_bytes
from kme_dist.data.rows import RowsRef, warn_of_squeezed
from kme_dist.data.validation import as_numbers
from kme_dist.errors import ConfigError, DataError, counted, warn
from kme_dist.models.account import Account
from kme_dist.models.base import (
    DTYPES,
    Arrays,
    Estimator,
    Facts,
    Own,
    get_rows,
    has_rows,
    on_workers,
    put_rows,
    scaling_arrays,
    stored_scaling,
)
from kme_dist.models.classifier import in_memory, sample_weights
from kme_dist.models.settings import (
    RandomState,
    Rule,
    drawn_seed,
    fraction,
    integer,
    jobs,
    one_of,
    positive,
    seed,
    truth,
)
from kme_dist.run.learners import Record
from kme_dist.run.regression import SOLVERS, RegressionFit, Target, fit_regression, learn_regression
from kme_dist.run.train import Candidate, Recipe
from kme_dist.run.workers import executor_for, scratch_for, share

_COPIES = 4  # of drawn targets that are in memory at a time: positions, residuals, values, the result
_QUERY_ROWS = 512  # whose residual weights are held at a time


class CMERegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """E[Y | x] by a conditional mean embedding that learns its own kernel; targets are centred and scaled inside.

    Parameters
    ----------
    kernel : str or Kernel
        A name (stationary kernels get one length scale per feature) or a kernel object; the start of learning. "auto"
        learns Matérn length scales and keeps the best of Gaussian and Matérn 1/2, 3/2 and 5/2 kernels.
    regularization : initial λ of a kernel that is not learned: with steps=0 kernel and λ are used as given.
    batch_size, steps, learning_rate, optimizer : learning by the leave-one-out squared error on batches, in closed
        form; at most 100 steps are made.
    refit_regularization : with centres, retune λ by leave-one-out on all rows.
    scaling : {"auto", "standard", "unit", None}
        Of the inputs. "auto" is "standard", but normal scores for features with heavy tails where that is better.
    solver, centres : the final fit: "auto", "cholesky" (exact), "tiled" and "pcg" (exact, out of core), "nystrom"
        with up to 4,000 centres, or "falkon" with more of them (up to a twentieth of the rows, at most 4,000, is held
        out of the fit, for λ and intervals).
    dtype : precision of the rows; a solve uses what it needs.
    warm_start : `fit` of a fitted model starts from the learned kernel and λ.
    client, n_jobs, random_state, verbose, fit_seconds, memory : as in `MCEClassifier`.

    Attributes
    ----------
    kernel_, regularization_ : what was learned.   kernel_name_ : the profile kept, or "learned", "common", "given".
    loo_errors_ : root mean squared leave-one-out error of each candidate on a sample, over the targets' deviation.
    loo_rmse_ : the same of the final fit, in the unit of the targets, one for each output; with solver "falkon" of
        the rows held out.
    target_ : mean and deviation of the targets.   solver_, solver_reason_, history_, n_features_in_, n_outputs_.
    """

    _BATCHED: ClassVar[bool] = True
    _SPARSE: ClassVar[bool] = True
    _RULES: ClassVar[Mapping[str, Rule]] = {
        "regularization": positive(),
        "batch_size": integer(2, optional=True),
        "steps": integer(0),
        "learning_rate": positive(),
        "refit_regularization": truth(),
        "scaling": one_of("auto", "standard", "unit", None),
        "solver": one_of("auto", *SOLVERS),
        "centres": integer(1, optional=True),
        "dtype": one_of(*DTYPES),
        "warm_start": truth(),
        "random_state": seed(),
        "verbose": integer(0),
        "n_jobs": jobs(),
        "fit_seconds": positive(optional=True),
    }
    embedding_: Embedding
    left_out_: LeftOut
    target_: Target
    history_: list[Record]

    def __init__(
        self,
        kernel: str | Kernel = "auto",
        regularization: float = 1e-3,
        batch_size: int | None = None,
        steps: int = 60,
        learning_rate: float = 0.1,
        optimizer: str = "adam",
        refit_regularization: bool = True,
        scaling: str | None = "auto",
        solver: str = "auto",
        centres: int | None = None,
        dtype: str = "float32",
        client: Any = None,
        random_state: RandomState = 0,
        verbose: int = 0,
        warm_start: bool = False,
        n_jobs: int | None = None,
        fit_seconds: float | None = None,
        memory: int | str | None = None,
    ) -> None:
        self.kernel = kernel
        self.regularization = regularization
        self.batch_size = batch_size
        self.steps = steps
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.refit_regularization = refit_regularization
        self.scaling = scaling
        self.solver = solver
        self.centres = centres
        self.dtype = dtype
        self.client = client
        self.random_state = random_state
        self.verbose = verbose
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.fit_seconds = fit_seconds
        self.memory = memory

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    # --- fitting ---------------------------------------------------------------------------------

    @on_workers
    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        callback: Callable[[Record], None] | None = None,
    ) -> Self:
        """Learn the kernel and λ, then solve on all rows.

        X is a table of numbers (also a sparse matrix) with y its targets, (n,) or (n, outputs), or an open `Dataset`
        with numeric labels (its "train" split if it has one). A row of weight 2 counts as the row twice, of weight 0 as
        no row. `callback` receives the record of every learning step. The same bits in this process and with a
        `client`.
        """
        self._begin_fit()
        records: list[Record] = []
        if self.warm_start:
            self._check_same_width(X)
        with contextlib.ExitStack() as stack:
            data, folder = self._numeric_rows(X, y, sample_weight, stack)
            executor, recipe = self._executor(), self.recipe(data)
            account = Account(self.verbose, type(self).__name__)
            account.begin(f"{data.split_positive(data.training_split()):,} rows, {data.features} features")

            def step(record: Record) -> None:
                records.append(record)
                account.step(record)
                if callback is not None:
                    callback(record)

            candidates = learn_regression(data, recipe, executor=executor, callback=step)
            account.finish_learning()
            scratch = scratch_for(data, folder, self._client, stack)
            fit = fit_regression(
                data, recipe, candidates[0], executor=executor, scratch=scratch, report=account.say_once
            )
            self.adopt(data, candidates, fit)
        self.history_ = records
        errors = ", ".join(f"{name} {error:.4f}" for name, error in self.loo_errors_.items())
        if errors:
            account.say(f"leave-one-out error over the targets' deviation: {errors}; kept {self.kernel_name_}")
        if (curves := self.scaling_.curves) is not None:
            account.say(f"{counted(len(curves.columns), 'feature')} with heavy tails: normal scores")
        account.say(f"lambda {self.regularization_:.3g}, kernel {self.kernel_!r}")
        account.done()
        return self

    def _numeric_rows(
        self, X: Any, y: Any, sample_weight: Any, stack: contextlib.ExitStack
    ) -> tuple[RowSource, str | None]:
        """The rows, and the folder from which local workers read them, if that is necessary."""
        if isinstance(X, Dataset):
            if y is not None or sample_weight is not None:
                raise DataError(f"{X.path} has its own targets and weights; call fit(dataset) without y")
            if X.classes is not None or X.y is None:
                raise DataError(
                    f"{X.path} has no numeric targets; ingest it again with the column named by `label` and the task "
                    "regression"
                )
            self._record_dataset(X)
            self._single = True
            return X, None
        X, y = self._fit_rows(in_memory(X), in_memory(y), y_numeric=True, multi_output=True)
        y = np.asarray(y, np.float64)
        self._single = y.ndim == 1
        X, y, weights = positive_rows(X, y, sample_weights(in_memory(sample_weight), X))
        data = ArrayRows(X, y, None, getattr(self, "feature_names_in_", None), weights)
        return data, share(data, self._client, stack)

    def recipe(self, data: RowSource) -> Recipe:
        """The settings as a recipe for learning and fitting."""
        any_profile = isinstance(self.kernel, str) and self.kernel == "auto"
        start = Matern(nu=1.5, length_scale=np.ones(data.features)) if any_profile else self.kernel
        start = kernels.from_config(start, n_features=data.features)
        before = getattr(self, "kernel_", None) if self.warm_start else None
        warm = before is not None and (any_profile or type(before) is type(start))
        return Recipe(
            kernel=before if before is not None and warm else start,
            regularization=float(self.regularization_ if warm else self.regularization),
            refit_regularization=bool(self.refit_regularization),
            batch_size=None if self.batch_size is None else int(self.batch_size),
            steps=int(self.steps),
            learning_rate=self.learning_rate,
            optimizer=self.optimizer,
            scaling=self.scaling,
            solver=self.solver,
            centres=None if self.centres is None else int(self.centres),
            dtype=self.dtype,
            seed=self._seed(),
            fit_seconds=None if self.fit_seconds is None else float(self.fit_seconds),
            memory=None if self.memory is None else positive_bytes("memory", self.memory),
            profiles=any_profile and not warm,
            warm=warm,
            curves=self.scaling_.curves if warm else None,
            base="standard",
        )

    def adopt(self, data: RowSource, candidates: list[Candidate], fit: RegressionFit) -> Self:
        """Take over the result of learning and fitting on `data`."""
        if isinstance(data, Dataset):
            self._record_dataset(data)
            self._single = True
        self._record_data(RowsRef.of(data))
        self.embedding_, self.left_out_, self.target_, self.scaling_ = (
            fit.embedding, fit.left_out, fit.target, fit.scaling,
        )  # fmt: skip
        self.kernel_, self.regularization_ = fit.embedding.kernel, fit.regularization
        self.kernel_name_ = candidates[0].name
        self.loo_errors_ = {c.name: float(np.sqrt(c.loss)) for c in candidates if c.loss is not None}
        self.solver_, self.solver_reason_ = fit.solver, fit.reason
        self.history_ = list(candidates[0].history)
        warn_of_squeezed(RowsRef.of(data), self.scaling_, self._seed())
        return self

    @property
    def n_outputs_(self) -> int:
        self._check_fitted()
        return len(self.target_.mean)

    @property
    def loo_rmse_(self) -> Any:
        self._check_fitted()
        return self._shaped(self.target_.width * np.sqrt(np.mean(self.left_out_.residuals**2, axis=0)))

    # --- predicting ------------------------------------------------------------------------------

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R²; y may be the name of a column of X, as in `fit`."""
        X, y = split_target(X, y)
        return float(super().score(X, y, sample_weight))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """E[Y | x], far from all training rows their mean; with `return_std` also the deviation of Y around it."""
        names = ("mean", "std") if return_std else ("mean",)
        found = self.outputs(self._query_rows(X), names)
        mean = self._shaped(found["mean"])
        return (mean, self._shaped(found["std"])) if return_std else mean

    def outputs(self, rows: np.ndarray, names: Sequence[str], coverage: float = 0.9, local: bool = True) -> Facts:
        """For rows that are scaled already: any of "mean" and "std", (rows, outputs), and "interval", a pair of such.

        Batch inference (`kme_dist.predict`) stores them.
        """
        f, width = self._mean(rows), self.target_.width
        found: Facts = {"mean": self.target_.restored(f)} if "mean" in names else {}
        if "std" in names:
            found["std"] = width * np.concatenate([F.deviation() for F in self._distributions(rows, f)])
        if "interval" in names:
            with blas_threads(1):
                ends = [self.left_out_.interval(f[p], Z, coverage, local) for p, Z in self._beside(rows)]
            found["interval"] = tuple(self.target_.restored(np.concatenate([end[i] for end in ends])) for i in (0, 1))
        return found

    def predict_interval(self, X: Any, coverage: float = 0.9, local: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of a prediction interval at every row of X, by jackknife+ from leave-one-out residuals.

        It covers a new target with about this probability (without `local` at least 2 coverage - 1 whatever the
        distribution). With `local` residuals are scaled by their size near x. Residuals are those of at most 1,000
        rows; with fewer than coverage / (1 - coverage) of them intervals are infinite, with a warning.
        """
        fraction().check("coverage", coverage)
        self._check_fitted()
        if words := self.left_out_.too_few(coverage):
            warn(words)
        low, high = self.outputs(self._query_rows(X), ("interval",), float(coverage), local)["interval"]
        return self._shaped(low), self._shaped(high)

    def predict_quantiles(self, X: Any, q: Any) -> np.ndarray:
        """Quantiles of Y given x at the levels `q`: (rows, levels), of several outputs (rows, outputs, levels); one
        level given as a number has no axis of its own."""
        levels = as_numbers(q, "q")
        if levels.ndim > 1 or not ((levels >= 0) & (levels <= 1)).all():
            raise ConfigError(f"q={q!r}: must be a number from 0 to 1, or a list of them")
        parts = [F.quantiles(levels.reshape(-1)) for F in self._distributions(*self._rows_and_mean(X))]
        found = np.concatenate(parts)
        found = found * self.target_.width[:, None] + self.target_.mean[:, None]
        found = found[:, 0] if self._single else found
        return np.asarray(found[..., 0] if levels.ndim == 0 else found)

    def sample(self, X: Any, n: int = 1, random_state: RandomState = None) -> np.ndarray:
        """`n` random targets for every row of X, (rows, n) or (rows, n, outputs).

        Residuals are drawn with the clip-normalised weights of their rows at x, as in `predict_quantiles`, and added to
        the mean. `random_state`: an integer gives the same targets in every call; None uses that of the model.
        """
        integer(1).check("n", n)
        seed().check("random_state", random_state)
        rng = np.random.default_rng([self._seed() if random_state is None else drawn_seed(random_state), 10])
        rows, mean = self._rows_and_mean(X)
        needed = 8 * int(n) * mean.size * _COPIES
        if needed > free_bytes("numpy"):
            raise ConfigError(
                f"n={n}: {n} targets for {counted(len(mean), 'row')} need {needed / 1e9:.3g} GB of memory; draw "
                "fewer, or in several calls with other values of random_state"
            )
        parts = [F.sample(int(n), rng) for F in self._distributions(rows, mean)]
        found = self.target_.restored(np.concatenate(parts))
        return np.asarray(found[..., 0] if self._single else found)

    def expectation(self, X: Any, h: Callable[[np.ndarray], Any]) -> np.ndarray:
        """E[h(Y) | x] under the distribution that `sample` draws from; `h` maps targets, (values,) or (values,
        outputs), to a value or a row of values for each. That of y itself is `predict`."""

        if not callable(h):
            raise DataError(f"h must be a function of the targets, got {str(h)[:60]!r}")

        def inside(values: np.ndarray) -> np.ndarray:
            given = self.target_.restored(values)
            found = as_numbers(h(given[:, 0] if self._single else given), "the values of h")
            if found.shape[:1] != (len(values),):
                raise DataError(f"h must return one value for each of {len(values)} targets, got shape {found.shape}")
            return found

        parts = [F.expectation(inside) for F in self._distributions(*self._rows_and_mean(X))]
        return np.concatenate(parts)

    def _rows_and_mean(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = self._query_rows(X)
        return rows, self._mean(rows)

    def _mean(self, rows: np.ndarray) -> np.ndarray:
        """The mean of standardised targets, (rows, outputs), tile by tile: the same bits on any number of cores."""
        decide = Decision(self.embedding_, "float64")
        calls = [(rows[part],) for part in row_blocks(max(1, len(rows)), HOST_TILE[0])]
        executor = executor_for(None, threads=1 if self.n_jobs == 1 else None)
        return np.concatenate([np.asarray(part) for part in executor.map(decide, calls, name="decide")])

    def _beside(self, rows: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """In blocks of rows: k(x, centres), or rows held out, in the precision of the residuals' weights."""
        kernel, left = self.kernel_, self.left_out_
        own = str(left.columns.dtype)
        centres = astype(self.embedding_.centres if left.held_out is None else left.held_out, own)
        for part in row_blocks(len(rows), _QUERY_ROWS):
            yield part, np.asarray(kernel.gram(rows[part].astype(own), centres))

    def _distributions(self, rows: np.ndarray, f: np.ndarray) -> Iterator[Predictive]:
        with blas_threads(1):
            for part, Z in self._beside(rows):
                yield self.left_out_.distribution(f[part], Z)

    def _shaped(self, values: np.ndarray) -> Any:
        """(rows, outputs) as y was given: (rows,) for one column of targets."""
        return values[..., 0] if self._single else values

    # --- storing ---------------------------------------------------------------------------------

    def _pack(self) -> tuple[Arrays, Facts]:
        left = self.left_out_
        arrays: Arrays = {
            "weights": self.embedding_.weights, **scaling_arrays(self.scaling_),
            "target/mean": self.target_.mean, "target/width": self.target_.width, "left_out/columns": left.columns,
            "left_out/residuals": left.residuals, "left_out/sizes": left.sizes,
        }  # fmt: skip
        facts: Facts = {}
        if left.held_out is not None:
            put_rows(arrays, facts, "left_out/rows", left.held_out)
        if left.near is not None:
            arrays |= {"left_out/ones": left.near.ones, "left_out/typical": left.near.typical}
        put_rows(arrays, facts, "centres", self.embedding_.centres)
        return arrays, {
            **facts,
            "kernel": self.kernel_.to_config(),
            "regularization": self.regularization_,
            "kernel_name": self.kernel_name_,
            "loo_errors": self.loo_errors_,
            "solver": self.solver_,
            "solver_reason": self.solver_reason_,
            "single": self._single,
            "history": self.history_,
        }

    def _unpack(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], own: Own) -> None:
        self.kernel_ = kernels.from_config(facts["kernel"], own=own)
        self.regularization_ = float(facts["regularization"])
        centres = get_rows(arrays, facts, "centres")
        self.embedding_ = Embedding(self.kernel_, centres, arrays["weights"], self.regularization_)
        columns, residuals, sizes = (arrays[f"left_out/{name}"] for name in ("columns", "residuals", "sizes"))
        near = Near(arrays["left_out/ones"], arrays["left_out/typical"]) if "left_out/ones" in arrays else None
        held_out = get_rows(arrays, facts, "left_out/rows") if has_rows(arrays, facts, "left_out/rows") else None
        self.left_out_ = LeftOut(columns, residuals, sizes, held_out, near)
        self.target_ = Target(arrays["target/mean"], arrays["target/width"])
        self.scaling_, self._single = stored_scaling(arrays), bool(facts["single"])
        self.kernel_name_, self.loo_errors_ = facts["kernel_name"], dict(facts["loo_errors"])
        self.solver_, self.solver_reason_ = facts["solver"], facts["solver_reason"]
        self.history_, self.n_features_in_ = facts["history"], int(centres.shape[1])
