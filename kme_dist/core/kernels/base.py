"""What a kernel is: the base class, and how tiles become Gram matrices."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from kme_dist.backend import (
    Array,
    astype,
    empty_square,
    is_sparse,
    like,
    matmul,
    namespace_of,
    precision,
    release_memory,
    set_diagonal,
    to_host,
)
from kme_dist.errors import ConfigError, DataError, counted, memory_errors
from kme_dist.meter import metered

T = TypeVar("T")
Gradients = dict[str, Array]

_SINGLE_NUMBERS = ("scale", "offset", "shape")  # parameters that are never one per feature
_ORIGIN_ROWS = 33  # rows that the origin of a set of rows is estimated from
_FEWEST_ROWS = 16  # of a tile that is halved because memory does not suffice
_NEAR_ORIGIN = 4  # times the spread of a feature: up to this distance from 0 the origin is 0


def row_blocks(n: int, block: int) -> Iterator[slice]:
    """Consecutive slices of at most `block` rows covering 0..n."""
    for start in range(0, n, block):
        yield slice(start, min(start + block, n))


def tiles_that_fit(compute: Callable[[slice], T], n: int, rows: int) -> Iterator[tuple[slice, T]]:
    """(part, compute(part)) for consecutive parts of n rows, `rows` at a time; from the first part on that the memory
    of the device (or of the host) cannot hold, half as many. ConfigError if even a few rows are too many."""
    start = 0
    while start < n:
        part, found = slice(start, min(n, start + rows)), []
        with contextlib.suppress(MemoryError):  # CuPy's error is one as well
            found.append(compute(part))
        size = part.stop - part.start
        if not found and size > _FEWEST_ROWS:
            rows = size // 2
            release_memory()
            continue
        if not found:
            with memory_errors(f"a tile of {size} rows", "use fewer centres or features"):
                found.append(compute(part))
        yield part, found.pop()
        start = part.stop


def take(prepared: Any, rows: slice) -> Any:
    """Rows of whatever `prepare` returned: an array, a list, or a tuple of such."""
    if isinstance(prepared, tuple):
        return tuple(take(part, rows) for part in prepared)
    return prepared[rows, ...] if hasattr(prepared, "ndim") else prepared[rows]


def select(X: Any, rows: np.ndarray) -> Any:
    """Rows of an array on any device, or of a list, by their numbers."""
    return X[like(rows, X, dtype=np.int64)] if hasattr(X, "dtype") else [X[i] for i in rows]


def row_count(X: Any) -> int:
    """How many rows there are in an array of any library, or in a list."""
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)


def add_gradients(total: Gradients, part: Gradients) -> Gradients:
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value
    return total


class FeatureMap(Protocol):
    """Explicit features φ_θ(x) as the input of a kernel; see `OnFeatures`."""

    @property
    def parameters(self) -> Mapping[str, np.ndarray]: ...
    def replace(self, **values: Any) -> Any: ...
    def forward(self, X: Array) -> Array: ...
    def vjp(self, X: Array, Z_bar: Array) -> Gradients: ...


def _metered(evaluate: Callable[..., Array]) -> Callable[..., Array]:
    @functools.wraps(evaluate)
    def tile(self: Kernel, X: Any, X2: Any, out: Array = None) -> Array:
        with metered("gram"):
            return evaluate(self, X, X2, out)

    return tile


@dataclass(frozen=True, eq=False, repr=False)
class Kernel:
    """Base of all kernels. A subclass defines `evaluate`, `diag` and, to be learned, `pullback`."""

    name: ClassVar[str] = ""
    """Name of a built-in kernel in configs; other kernels are named by their class."""
    learned: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are positive parameters."""
    bounded: ClassVar[bool] = True
    """Whether sup_x k(x, x) is finite and the same for every data set."""

    # --- defined by subclasses -------------------------------------------------------------------

    def prepare(self, X: Any) -> Any:
        """Everything that is computed once per row before tiles are evaluated (default: nothing)."""
        return X

    def prepare_beside(self, X: Any, prepared: Any) -> Any:
        """`prepare(X)` for rows that are used with `prepared` ones in `evaluate(X, prepared)`.

        Kernels of differences use one origin for both (see `Differences`). The tile is the same without this, but the
        rows are then prepared twice.
        """
        return self.prepare(X)

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        """The tile K_ij = k(x_i, x2_j) for prepared rows; may write into `out`."""
        raise ConfigError(f"{type(self).__name__} must define evaluate(X, X2, out=None)")

    def times(self, X: Any, X2: Any, V: Array, total: Array = None, out: Array = None) -> Array:
        """total + K V for a tile of prepared rows; may overwrite `total`. `out` is memory for the tile."""
        part = matmul(self.evaluate(X, X2, out), V)
        return part if total is None else total + part

    def diag(self, X: Any) -> Array:
        """k(x_i, x_i) for raw rows."""
        raise ConfigError(f"{type(self).__name__} must define diag(X)")

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        """sum_ij K_bar_ij dK_ij/d log θ for a tile of prepared rows.

        K is the tile itself, or None where the caller does not have it. K_bar may be overwritten.
        """
        raise ConfigError(
            f"{type(self).__name__} has no gradient: define pullback(X, X2, K, K_bar), "
            "or use objective='cv', 'median' or steps=0"
        )

    def collect(self, gradients: Gradients) -> Gradients:
        """Final gradients from the summed pullbacks of all tiles: for work that is cheaper done once."""
        return gradients

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        """Cotangents of the raw rows of X and X2; only kernels of vectors have them."""
        raise ConfigError(f"{type(self).__name__} is not differentiable in its inputs")

    # --- called by users -------------------------------------------------------------------------

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "evaluate" in vars(cls):  # also for user-defined kernels: the tiles of every solver are counted here
            cls.evaluate = _metered(cls.evaluate)  # type: ignore[method-assign]
        if "prepare" in vars(cls) and "prepare_beside" not in vars(cls):  # never bypasses a subclass's `prepare`
            cls.prepare_beside = Kernel.prepare_beside  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):  # e.g. a degree from a grid of np.arange
                object.__setattr__(self, field.name, value.item())
        for name in self.learned:
            value = getattr(self, name)
            if value is None:
                continue
            try:
                array = np.array(value, dtype=np.float64)
            except (TypeError, ValueError):
                array = np.array(math.nan)
            most = 0 if name in _SINGLE_NUMBERS else 1
            if array.ndim > most or not np.isfinite(array).all() or not (array > 0).all():
                needed = "a positive number" + (" or a list of positive numbers" if most else "")
                raise ConfigError(f"{type(self).__name__}({name}={value!r}): must be {needed}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The learnable parameters by name."""
        values = {name: getattr(self, name) for name in self.learned}
        return {name: value for name, value in values.items() if value is not None}

    def replace(self, values: Mapping[str, Any] | None = None, **more: Any) -> Kernel:
        """The same kernel with some parameters changed."""
        changes = {**(values or {}), **more}
        unknown = sorted(set(changes) - set(self.parameters))
        if unknown:
            raise ConfigError(f"{self!r} has no parameter {unknown[0]!r}; it has {sorted(self.parameters)}")
        return self._replaced(changes)

    def _replaced(self, changes: Mapping[str, Any]) -> Kernel:
        return dataclasses.replace(self, **changes)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings by name, as scikit-learn asks for them; `deep` adds those of kernels within, "k1__scale"."""
        found: dict[str, Any] = {}
        for name, value in self._settings().items():
            found[name] = float(value) if isinstance(value, np.ndarray) and value.ndim == 0 else value
            if deep and isinstance(value, Kernel):
                found.update({f"{name}__{inner}": v for inner, v in value.get_params().items()})
        return found

    def with_params(self, **changes: Any) -> Kernel:
        """A copy with other settings, by the names of `get_params`."""
        known, own = self._settings(), {}
        within: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            name, nested, inner = key.partition("__")
            if name not in known or (nested and not isinstance(changes.get(name, known[name]), Kernel)):
                names = list(self.get_params())
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{self!r} has no setting {key!r}{hint} (it has {', '.join(names)})")
            if nested:
                within.setdefault(name, {})[inner] = value
            else:
                own[name] = value
        for name, inner_changes in within.items():
            own[name] = own.get(name, known[name]).with_params(**inner_changes)
        return self._with_settings(own)

    def set_params(self, **changes: Any) -> Kernel:
        """Raises an error: kernels never change. `set_params` of an estimator replaces its kernel."""
        raise ConfigError(f"{self!r} is immutable; make a changed copy: kernel.with_params({_arguments(changes)})")

    def __sklearn_clone__(self) -> Kernel:
        return self

    def _settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}

    def _with_settings(self, own: Mapping[str, Any]) -> Kernel:
        return dataclasses.replace(self, **own)

    def gram(self, X: Any, X2: Any = None, out: Array = None, prepared: Any = None) -> Array:
        """The Gram matrix. Without X2 (or with X2 the same object) it is symmetric with an exact diagonal.

        `out` receives the result where the kernel can write in place; `prepared` is `prepare(X)`, if the caller has it
        already (symmetric Gram matrices only).
        """
        if X2 is None or X2 is X:
            return self._symmetric_gram(X, out, prepared)
        columns = self.prepare(X2)
        return self.evaluate(self.prepare_beside(X, columns), columns, out)

    __call__ = gram

    def _symmetric_gram(self, X: Any, out: Array, prepared: Any) -> Array:
        prepared = self.prepare(X) if prepared is None else prepared
        n, diagonal = row_count(X), self.diag(X)
        K = empty_square(n, diagonal) if out is None else out
        for columns in row_blocks(n, tile_rows(diagonal)):
            rows = slice(columns.start, n)
            tile = K[rows, columns]
            value = self.evaluate(take(prepared, rows), take(prepared, columns), out=tile)
            if value is not tile:
                K[rows, columns] = value
            K[columns, columns.stop : n] = K[columns.stop : n, columns].T
        # The square blocks on the diagonal were computed in full; rounding may have left them slightly asymmetric.
        for block in row_blocks(n, tile_rows(diagonal)):
            lower = namespace_of(K).tril(K[block, block], k=-1)
            K[block, block] = lower + lower.T
        set_diagonal(K, diagonal)
        return K

    def vjp(self, X: Any, X2: Any, K_bar: Array) -> Gradients:
        """sum_ij K_bar_ij dK_ij/d log θ; X2=None means the symmetric Gram matrix of X."""
        columns = self.prepare(X if X2 is None else X2)
        return self.collect(self.pullback(self.prepare_beside(X, columns), columns, None, K_bar + 0))

    def alpha(self, X: Any = None) -> float:
        """sqrt(sup_x k(x, x)): exact for bounded kernels, over the rows of X for the others."""
        return math.sqrt(max(float(self.diag_supremum(X)[0]), 0.0))

    def diag_supremum(self, X: Any) -> tuple[Array, int]:
        """The largest k(x, x) among the rows of X and the row where it is attained."""
        if X is None:
            raise ConfigError(f"{self!r} is unbounded: alpha(X) requires rows")
        values = self.diag(X)
        if self.bounded:
            return values[0], 0  # constant: no search, no synchronisation
        xp = namespace_of(values)
        where = int(xp.argmax(values))
        return values[where], where

    # --- algebra and identity --------------------------------------------------------------------

    def __add__(self, other: Kernel) -> Kernel:
        from kme_dist.core.kernels.composite import Sum

        if not isinstance(other, Kernel):
            return NotImplemented
        return Sum((*Sum.flatten(self), *Sum.flatten(other)))

    def __mul__(self, other: Kernel | float) -> Kernel:
        from kme_dist.core.kernels.composite import Product, Scaled

        if isinstance(other, Kernel):
            return Product((*Product.flatten(self), *Product.flatten(other)))
        if not isinstance(other, int | float | np.number) or not other > 0:
            raise ConfigError(f"a kernel can be multiplied by a kernel or a positive number, got {other!r}")
        return Scaled((self,), scale=math.sqrt(other))

    __rmul__ = __mul__

    def to_config(self) -> dict[str, Any]:
        """Plain data from which `from_config` builds an equal kernel."""
        config: dict[str, Any] = {"name": self.name or type(self).__name__}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                config[field.name] = value.tolist() if isinstance(value, np.ndarray) else value
        return config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.to_config() == other.to_config()

    def __hash__(self) -> int:
        return hash(repr(self.to_config()))

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{field.name}={_short(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        )
        return f"{type(self).__name__}({shown})"


# --- origin of the rows ----------------------------------------------------------------------------


class Frame:
    """The origin subtracted from prepared rows, and their largest distance from it; stored with the rows.

    |z|² + |z'|² - 2 z·z' loses the digits of a distance when |z| >> |z - z'|, and so does x / length_scale. So one
    vector is subtracted from the rows of both sides first. Slicing rows leaves the frame unchanged.
    """

    ndim = 1  # so that `take` indexes it like an array

    def __init__(self, origin: np.ndarray | None = None, reach: float = 0.0) -> None:
        self.origin = None if origin is None or not origin.any() else origin  # None means 0
        self.reach = reach  # the largest |z|² among the rows

    def __getitem__(self, rows: Any) -> Frame:
        return self

    def same_origin(self, other: Frame) -> bool:
        if self.origin is other.origin:
            return True
        return self.origin is not None and other.origin is not None and np.array_equal(self.origin, other.origin)

    def subtract(self, X: Array) -> Array:
        """X - origin; in double where X's precision cannot represent the origin, since both sides must share it."""
        if self.origin is None:
            return X
        if is_sparse(X):
            X = X.toarray()
        if precision(X) == "float32" and (self.origin.astype(np.float32) != self.origin).any():
            X = astype(X, "float64")
        return X - like(self.origin, X)


def origin_of(X: Array) -> np.ndarray | None:
    """A central point of the rows, by feature; None where that is 0 for all of them.

    The median of at most 33 evenly spaced rows, where it is farther from 0 than four times their spread (the
    interquartile range). It is rounded to a multiple of a power of two below the spread, so that x - origin is exact
    for the rows around it. A function of the rows only.
    """
    if is_sparse(X):  # most entries are 0, and stay so
        return None
    step = max(1, -(-X.shape[0] // _ORIGIN_ROWS))
    sample = np.sort(np.asarray(to_host(X[::step, :]), dtype=np.float64), axis=0)
    n = len(sample)
    if not n:
        return None
    with np.errstate(all="ignore"):
        median, spread = sample[(n - 1) // 2], sample[n - 1 - n // 4] - sample[n // 4]
        far = np.isfinite(median) & (np.abs(median) > _NEAR_ORIGIN * spread)
        if not far.any():
            return None
        _, exponent = np.frexp(spread)
        rounded = np.ldexp(np.rint(np.ldexp(median, 1 - exponent)), exponent - 1)
        rounded = np.where((spread > 0) & np.isfinite(rounded), rounded, median)
        return np.where(far, rounded, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class Differences(Kernel):
    """A kernel of x - x': a common origin is subtracted from both sides before anything is computed.

    Prepared rows are a tuple that ends with the rows as given and their `Frame`. Rows that were prepared separately
    have different origins; then those of the first side are prepared again with the frame of the second. So a tile
    depends on its rows and on the second side, never on the history of `prepare` calls.
    """

    shift_invariant: ClassVar[bool] = True
    """Whether subtracting any vector c from the rows of both sides leaves the kernel unchanged."""

    def prepared(self, X: Array, frame: Frame) -> tuple[Any, ...]:
        """The prepared rows relative to the origin of `frame`; ends with X and a frame of that origin."""
        raise ConfigError(f"{type(self).__name__} must define prepared(X, frame)")

    def check(self, X: Any) -> Array:
        """X, checked against the kernel's parameters."""
        return check_vectors(X, self, None)

    def prepare(self, X: Array) -> Any:
        return self.prepared(X, Frame(origin_of(self.check(X)) if self.shift_invariant else None))

    def prepare_beside(self, X: Array, prepared: Any) -> Any:
        _, frame = _given_rows(prepared)
        return self.prepare(X) if frame is None else self.prepared(self.check(X), frame)

    def aligned(self, X: Any, X2: Any) -> Any:
        """X relative to the origin of X2."""
        rows, frame = _given_rows(X)
        _, wanted = _given_rows(X2)
        if frame is None or wanted is None or frame.same_origin(wanted):
            return X
        return self.prepared(rows, wanted)


def _given_rows(prepared: Any) -> tuple[Any, Frame | None]:
    """The rows as given and their frame: the end of the tuple, whatever a subclass puts before."""
    for i in range(len(prepared) - 1, 0, -1):
        if isinstance(prepared[i], Frame):
            return prepared[i - 1], prepared[i]
    return None, None


def tile_rows(reference: Array) -> int:
    """Rows in a tile: small enough for a core's cache on the host, large enough for a GPU's launch cost."""
    return 128 if isinstance(reference, np.ndarray) else 2048


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            return f"{float(value):.4g}"
        shown = ", ".join(f"{v:.4g}" for v in value[:4])
        return f"[{shown}{', ...' if value.size > 4 else ''}]"
    return repr(value)


def check_vectors(X: Any, kernel: Kernel, length_scale: np.ndarray | None) -> Array:
    """Check that X is a matrix of floats that fits the length scales (or periods, or frequencies)."""
    if getattr(X, "ndim", None) != 2:
        raise DataError(
            f"{type(kernel).__name__} expects a matrix of rows and features, got {type(X).__name__} "
            f"of shape {getattr(X, 'shape', None)}"
        )
    xp = namespace_of(X)
    if X.dtype not in (xp.float32, xp.float64):
        raise DataError(
            f"{type(kernel).__name__} expects rows of float32 or float64, got {X.dtype}; convert them first"
        )
    if length_scale is not None and length_scale.ndim == 1 and length_scale.size != X.shape[1]:
        raise DataError(
            f"{type(kernel).__name__} has {counted(length_scale.size, 'length scale')}, the data have "
            f"{counted(X.shape[1], 'feature')}"
        )
    return X


def by_shape(per_feature: Array, parameter: np.ndarray) -> Array:
    """A gradient per feature, summed where one length scale serves all features."""
    return per_feature if parameter.ndim == 1 else namespace_of(per_feature).sum(per_feature)


def median_length_scale(X: np.ndarray, seed: int, pairs: int = 10_000) -> float:
    """The median distance between random pairs of rows: the heuristic for one common length scale.

    1 for rows that are not vectors.
    """
    if not hasattr(X, "dtype"):
        return 1.0
    rng = np.random.default_rng(seed)
    i, j = rng.integers(0, row_count(X), size=(2, pairs))
    differences = (X[i[i != j]] - X[j[i != j]]).astype(np.float64)
    distances = np.sqrt(np.sum(differences**2, axis=1))
    distances = distances[distances > 0]
    if distances.size or is_sparse(X):
        return float(np.median(distances)) if distances.size else 1.0
    largest = float(np.abs(differences).max(initial=0.0))  # of tiny numbers, squares underflow
    return largest * median_length_scale(X / largest, seed, pairs) if largest > 0 else 1.0


def length_scale_names(kernel: Kernel) -> list[str]:
    """Parameters that measure distance, in a kernel and its parts."""
    return [name for name in kernel.parameters if name.rsplit(".", 1)[-1] == "length_scale"]
