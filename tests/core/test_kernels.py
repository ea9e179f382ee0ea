"""What every kernel promises, in one class that any new kernel's test inherits; then what single kernels promise."""

from __future__ import annotations

import dataclasses
import math
import pickle
import textwrap
from typing import Any

import numpy as np
import oracles
import pytest
from kernel_table import (
    ARD,
    BAG_KERNELS,
    FEATURE_KERNELS,
    OWN_KERNELS,
    STRING_KERNELS,
    VECTOR_KERNELS,
    Tanimoto,
    bags,
    strings,
    vectors,
)

from kme_dist import errors
from kme_dist.core import kernels
from kme_dist.core.kernels import Gaussian, Linear, Matern, Periodic, Polynomial, Spectrum, from_config
from kme_dist.core.objective import loo_objective, rcb_objective

UNIT = {"float64": 1e-14, "float32": 2e-6}


def naive(kernel, X, X2):
    return oracles.gram(kernel, dict(kernel.parameters), X, X2)


class KernelContract:
    """Inherit it, and give two fixtures: `kernel`, and `rows(n, seed)` that makes rows for it."""

    def test_gram_matches_the_formula(self, kernel, rows, dtype):
        X, X2 = rows(12, 1), rows(9, 2)
        for left, right in ((X, X2), (X, X)):
            expected = naive(kernel, left.host, right.host)
            found = left.back(kernel.gram(left.data, right.data))
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e3 * UNIT[dtype] * abs(expected).max())

    def test_gram_is_symmetric_to_the_bit(self, kernel, rows):
        X = rows(140, 1)  # more rows than one tile
        K = X.back(kernel.gram(X.data))
        assert (K == K.T).all()
        assert (X.back(kernel(X.data, X.data)) == K).all()

    def test_diagonal_is_exact(self, kernel, rows, dtype):
        X = rows(20, 1)
        diagonal = X.back(kernel.diag(X.data))
        assert (X.back(kernel.gram(X.data)).diagonal() == diagonal).all()
        np.testing.assert_allclose(diagonal, naive(kernel, X.host, X.host).diagonal(), rtol=10 * UNIT[dtype])

    def test_gram_is_positive_semi_definite(self, kernel, rows, dtype):
        X = rows(30, 1)
        eigenvalues = np.linalg.eigvalsh(X.back(kernel.gram(X.data)).astype(np.float64))
        assert eigenvalues.min() > -100 * UNIT[dtype] * eigenvalues.max()

    def test_precision_of_the_rows_is_kept(self, kernel, rows, dtype):
        X = rows(5, 1)
        for array in (kernel.gram(X.data), kernel.gram(X.data, rows(4, 2).data), kernel.diag(X.data)):
            assert X.back(array).dtype == X.dtype

    def test_vjp_matches_finite_differences(self, kernel, rows, dtype, rng):
        """Differences of the kernel's own Gram matrices, on the host in double precision."""
        X, X2 = rows(7, 1), rows(6, 2)
        K_bar = rng.normal(size=(7, 6))
        found = kernel.vjp(X.data, X2.data, X.like(K_bar))
        for name, value in kernel.parameters.items():
            free = "features." in name  # any sign: no logarithm
            gradient = np.zeros(value.size)
            for i in range(value.size):
                step = np.zeros(value.size)
                step[i] = 1e-5
                step = step.reshape(value.shape)
                plus, minus = (kernel.replace({name: value + s if free else value * np.exp(s)}) for s in (step, -step))
                change = plus.gram(X.host, X2.host) - minus.gram(X.host, X2.host)
                gradient[i] = np.sum(K_bar * change) / 2e-5
            tolerance = {"float64": 1e-7, "float32": 1e-4}[dtype]
            np.testing.assert_allclose(X.back(found[name]).reshape(-1), gradient, rtol=tolerance, atol=tolerance)

    def test_vjp_matches_automatic_differentiation(self, kernel, rows, dtype, rng):
        X, X2 = rows(11, 1), rows(8, 2)
        for left, right in ((X, X2), (X, None)):
            other = left if right is None else right
            K_bar = rng.normal(size=(11, 11 if right is None else 8))
            found = kernel.vjp(left.data, None if right is None else right.data, left.like(K_bar))
            found = {name: left.back(value) for name, value in found.items()}
            expected = oracles.kernel_gradient(kernel, left.host, other.host, K_bar)
            assert oracles.relative_error(found, expected) < oracles.GRADIENT_TOLERANCE[dtype]

    def test_alpha_is_the_root_of_the_largest_diagonal_entry(self, kernel, rows, dtype):
        X = rows(15, 1)
        expected = math.sqrt(naive(kernel, X.host, X.host).diagonal().max())
        assert kernel.alpha(X.data) == pytest.approx(expected, rel=10 * UNIT[dtype])

    def test_survives_pickling(self, kernel, rows):
        X = rows(5, 1)
        copy = pickle.loads(pickle.dumps(kernel))
        assert repr(copy) == repr(kernel)
        assert (X.back(copy.gram(X.data)) == X.back(kernel.gram(X.data))).all()

    def test_is_a_value(self, kernel):
        name, value = next(iter(kernel.parameters.items()))
        changed = kernel.replace({name: value * 2})
        assert (changed.parameters[name] == value * 2).all()
        assert (kernel.parameters[name] == value).all()
        assert set(changed.parameters) == set(kernel.parameters)
        with pytest.raises(AttributeError):
            kernel.scale = 3.0
        with pytest.raises(errors.ConfigError, match="has no parameter 'wrong'"):
            kernel.replace(wrong=1.0)


class Rows:
    """Rows for a kernel: what the kernel sees, and plain double-precision host data for the oracle."""

    def __init__(self, host, data, arrays, dtype):
        self.host, self.data, self._arrays, self.dtype = host, data, arrays, dtype

    def back(self, array):
        return self._arrays.host(array)

    def like(self, host):
        return self._arrays(host, self.dtype)


class VectorContract(KernelContract):
    @pytest.fixture
    def rows(self, arrays, dtype):
        def make(n, seed):
            host = vectors(n, seed).astype(dtype)
            return Rows(host.astype(np.float64), arrays(host), arrays, dtype)

        return make


class TestVectorKernels(VectorContract):
    @pytest.fixture(params=VECTOR_KERNELS)
    def kernel(self, request):
        return VECTOR_KERNELS[request.param]

    def test_round_trip_through_plain_data(self, kernel):
        again = from_config(kernel.to_config())
        assert again == kernel
        assert hash(again) == hash(kernel)
        assert again.to_config() == kernel.to_config()


class TestOwnKernel(VectorContract):
    @pytest.fixture(params=OWN_KERNELS)
    def kernel(self, request):
        return OWN_KERNELS[request.param]

    def test_round_trip_needs_the_class(self, kernel):
        assert from_config(kernel.to_config(), own={"Tanimoto": Tanimoto}) == kernel
        with pytest.raises(errors.ConfigError, match="kernel 'Tanimoto' is unknown"):
            from_config(kernel.to_config())


@pytest.mark.parametrize(
    ("given", "near"), [("rbf", "gaussian"), ("RBF", "gaussian"), ("poly", "polynomial"), ("gausian", "gaussian")]
)
def test_an_unknown_name_gets_the_nearest_known_one(given, near):
    with pytest.raises(errors.ConfigError, match=f"kernel '{given}' is unknown; did you mean '{near}'"):
        from_config(given)


def test_own_kernel_of_the_module_guide_learns():
    guide = kernels.__doc__ or ""
    start = guide.index("    @dataclass")
    source = textwrap.dedent(guide[start : guide.index("Parameters are positive")])
    # Run under a name of its own: dataclasses look their module up.
    scope = {"__name__": __name__, "dataclass": dataclasses.dataclass, "Any": Any, "Kernel": kernels.Kernel}
    exec(source, scope)
    rng = np.random.default_rng(0)
    X, y = rng.random((12, 3)) + 0.1, np.arange(12) % 2
    for objective in (rcb_objective, loo_objective):
        out = objective(scope["Tanimoto"](), X, y, regularization=0.1, n_classes=2)
        assert set(out.gradient) == {"scale", "regularization"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (5, "must be a name"),
        ({"name": [1]}, "`name` must be a text"),
        ({"length_scale": 1.0}, "`name` must be a text"),
        ({"name": "sum", "parts": 5}, "must be a list of kernels"),
        ({"name": "sum", "parts": "gaussian"}, "must be a list of kernels"),
        ({"name": "gaussian", "ard": True, "length_scale": "abc"}, "must be a positive number"),
    ],
)
def test_a_wrong_kernel_config_is_one_clear_error(config, message):
    with pytest.raises(errors.ConfigError, match=message):
        from_config(config, n_features=3)


class TestKernelOnFeatures(VectorContract):
    @pytest.fixture(params=FEATURE_KERNELS)
    def kernel(self, request):
        return FEATURE_KERNELS[request.param]


class TestStringKernels(KernelContract):
    """Strings live on the host and their kernels in double precision: the inputs of a kernel are arbitrary."""

    @pytest.fixture(params=STRING_KERNELS)
    def kernel(self, request):
        return STRING_KERNELS[request.param]

    @pytest.fixture
    def dtype(self):
        return "float64"

    @pytest.fixture
    def rows(self, dtype):
        class Host:
            host = staticmethod(np.asarray)

            def __call__(self, values, dtype):
                return np.asarray(values, dtype=dtype)

        def make(n, seed):
            found = self.make(n, seed)
            return Rows(found, found, Host(), dtype)

        return make

    make = staticmethod(strings)


class TestBagKernels(TestStringKernels):
    @pytest.fixture(params=BAG_KERNELS)
    def kernel(self, request):
        return BAG_KERNELS[request.param]

    make = staticmethod(bags)


# --- single promises -------------------------------------------------------------------------------


def test_every_built_in_kernel_is_under_contract():
    tables = VECTOR_KERNELS | FEATURE_KERNELS | STRING_KERNELS | BAG_KERNELS
    tested = {type(part) for kernel in tables.values() for part in walk(kernel)}
    abstract = {kernels.Kernel, kernels.Stationary, kernels.Composite}
    built_in = {getattr(kernels, name) for name in kernels.__all__}
    built_in = {kind for kind in built_in if isinstance(kind, type) and issubclass(kind, kernels.Kernel)}
    assert built_in - abstract <= tested


def walk(kernel):
    yield kernel
    for part in getattr(kernel, "parts", ()):
        yield from walk(part)


def test_gram_is_exact_far_from_the_origin_for_equal_rows():
    X = np.full((5, 2), 1e4, dtype=np.float32)
    assert (Gaussian().gram(X).diagonal() == 1).all()


def test_gram_writes_where_it_is_told(rng):
    X = rng.normal(size=(300, 2))
    out = np.empty((300, 300), order="F")
    for kernel in (Gaussian(), Matern(), Linear() + Gaussian(), 2.0 * Linear()):
        assert kernel.gram(X, out=out) is out
        assert (out == kernel.gram(X)).all()


def test_linear_kernel_is_unbounded_and_says_so():
    with pytest.raises(errors.ConfigError, match="unbounded"):
        Linear().alpha()
    assert Linear(scale=2.0).alpha(np.array([[3.0, 4.0], [0.0, 1.0]])) == pytest.approx(10.0)


def test_sums_and_products_flatten_and_prefix():
    k = Gaussian() + Linear() + Matern()
    assert len(k.parts) == 3
    assert sorted((k * Gaussian()).parameters)[0] == "0.0.length_scale"
    assert set((0.5 * Linear()).parameters) == {"scale", "0.scale"}


def test_number_times_kernel_scales_the_gram_matrix(rng):
    X = rng.normal(size=(4, 2))
    np.testing.assert_allclose((3 * Gaussian()).gram(X), 3 * Gaussian().gram(X), rtol=1e-14)
    np.testing.assert_allclose((Gaussian() * 3).gram(X), 3 * Gaussian().gram(X), rtol=1e-14)


def test_convex_combination_stays_convex(rng):
    X = rng.normal(size=(4, 2))
    k = kernels.convex_combination(Gaussian(), Matern(), weights=[3.0, 9.0])
    assert k.shares == pytest.approx([0.25, 0.75])
    np.testing.assert_allclose(k.diag(X), 1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Gaussian(length_scale=-1.0), "length_scale=-1.0.*positive"),
        (lambda: Gaussian(length_scale=[1.0, 0.0]), "positive"),
        (lambda: Gaussian(length_scale="wide"), "length_scale='wide'"),
        (lambda: Gaussian(scale=math.nan), "scale=nan"),
        (lambda: Gaussian(scale=[1.0, 2.0]), r"scale=\[1.0, 2.0\].*a positive number"),
        (lambda: Polynomial(offset=[1.0, 2.0]), "offset"),
        (lambda: Matern(nu=1.0), "nu must be 0.5, 1.5 or 2.5"),
        (lambda: Polynomial(degree=0), "degree=0"),
        (lambda: Polynomial(degree=1.5), "degree=1.5"),
        (lambda: Spectrum(p=0), "p=0"),
        (lambda: kernels.convex_combination(Gaussian(), weights=[1, 2]), "one entry per kernel"),
        (lambda: kernels.Sum(()), "expects kernels as parts"),
        (lambda: Gaussian() * -2.0, "positive number, got -2.0"),
        (lambda: from_config("gausian"), "did you mean 'gaussian'"),
        (lambda: from_config({"name": "gaussian", "width": 1.0}), "no setting 'width'"),
    ],
)
def test_wrong_settings_are_refused_with_a_reason(build, message):
    with pytest.raises(errors.ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.zeros((4, 3)), "2 length scales, the data have 3 features"),
        (np.zeros(4), r"expects a matrix of rows and features.*\(4,\)"),
        ([[1.0, 2.0]], "expects a matrix of rows and features, got list"),
        (np.zeros((4, 2), dtype=np.int64), "float32 or float64, got int64"),
        (np.zeros((4, 2), dtype=np.float16), "float32 or float64, got float16"),
        (np.array([["a", "b"]]), "float32 or float64"),
    ],
)
def test_unfit_rows_are_refused_with_a_reason(X, message):
    for kernel in (Gaussian(length_scale=[1.0, 2.0]), Periodic(period=[1.0, 2.0]), Linear(length_scale=[1.0, 2.0])):
        with pytest.raises(errors.DataError, match=message):
            kernel.gram(X)


def test_strings_and_numbers_are_not_confused():
    with pytest.raises(errors.DataError, match="Spectrum expects strings, got float"):
        Spectrum().gram([1.0, 2.0])
    with pytest.raises(errors.DataError, match="expects a matrix"):
        Gaussian().gram(["abc"])


def test_short_strings_resemble_only_their_equals():
    K = Spectrum(p=3).gram(["ab", "ab", "ba", "abab", ""])
    expected = np.eye(5)
    expected[0, 1] = expected[1, 0] = 1.0
    assert (expected == K).all()


def test_kernel_without_gradient_says_what_to_do():
    class Bare(kernels.Kernel):
        def evaluate(self, X, X2, out=None):
            return X @ X2.T

    with pytest.raises(errors.ConfigError, match="define pullback"):
        Bare().vjp(np.ones((2, 2)), None, np.ones((2, 2)))
    with pytest.raises(errors.ConfigError, match=r"must define diag"):
        Bare().gram(np.ones((2, 2)))


def test_by_name_a_stationary_kernel_gets_one_length_scale_per_feature():
    assert from_config("gaussian", n_features=3).parameters["length_scale"].shape == (3,)
    assert from_config("cosine", n_features=3).parameters["frequency"].shape == (3,)
    assert from_config({"name": "gaussian", "length_scale": 2.0}, n_features=3).parameters["length_scale"].shape == ()
    ready = Gaussian(length_scale=ARD)
    assert from_config(ready) is ready


def test_the_derivative_of_a_kernel_on_features_goes_through_the_map_once():
    """However many tiles the Gram matrix has: once for the batch, and once for each part of a validation."""
    from kernel_table import labels as make_labels
    from kernel_table import tanh_layer, vectors

    from kme_dist.core.kernels import OnFeatures
    from kme_dist.core.objective import rcb_objective, validation_objective

    calls = []

    class Counted(type(tanh_layer())):
        def vjp(self, X, Z_bar):
            calls.append(len(X))
            return super().vjp(X, Z_bar)

        def replace(self, **values):
            return Counted(**{**self.parameters, **values})

    kernel = OnFeatures(Gaussian(length_scale=0.9), Counted(**tanh_layer().parameters))
    X, y = vectors(500), make_labels(500)
    rcb_objective(kernel, X, y, regularization=0.01, n_classes=3)
    assert calls == [500]
    calls.clear()
    validation_objective(kernel, X, y, train_rows=300, regularization=0.01, n_classes=3)
    assert sorted(calls) == [200, 300]


# --- settings by name, as in scikit-learn -----------------------------------------------------------


@pytest.mark.parametrize("name", [*VECTOR_KERNELS, *OWN_KERNELS, *FEATURE_KERNELS, *STRING_KERNELS])
def test_settings_are_read_and_changed_by_name(name):
    kernel = {**VECTOR_KERNELS, **OWN_KERNELS, **FEATURE_KERNELS, **STRING_KERNELS}[name]
    found = kernel.get_params()
    assert kernel.with_params(**kernel.get_params(deep=False)) == kernel
    inner = {key: value for key, value in found.items() if not isinstance(value, kernels.Kernel)}
    assert kernel.with_params(**inner) == kernel
    before = repr(kernel.to_config())
    for key, value in inner.items():
        if key.rsplit("__", 1)[-1] in ("length_scale", "scale") and value is not None:
            changed = kernel.with_params(**{key: 3.5})
            assert changed.get_params()[key] == 3.5
            assert changed != kernel
    assert repr(kernel.to_config()) == before


def test_parts_have_the_names_of_scikit_learn():
    kernel = Gaussian() + 0.5 * Matern(nu=0.5)
    assert kernel.with_params(k1=Linear(), k2__k1__nu=2.5) == Linear() + 0.5 * Matern(nu=2.5)
    assert kernel.with_params(k1=Matern(), k1__nu=2.5).parts[0] == Matern(nu=2.5)
    assert Polynomial().with_params(degree=np.int64(3)).to_config()["degree"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nuu": 1}, r"has no setting 'nuu'; did you mean 'nu'\? \(it has length_scale, scale, nu\)"),
        ({"k1__nu": 1}, "has no setting 'k1__nu'"),
        ({"scale__nu": 1}, "has no setting 'scale__nu'"),
        ({"nu": 7}, "nu must be 0.5, 1.5 or 2.5"),
    ],
)
def test_unknown_settings_are_named(changes, message):
    with pytest.raises(errors.ConfigError, match=message):
        Matern().with_params(**changes)


def test_a_kernel_is_never_changed_in_place():
    with pytest.raises(errors.ConfigError, match=r"immutable; make a changed copy: kernel\.with_params\(nu=0\.5\)"):
        Matern().set_params(nu=0.5)
