"""The CUDA source of tiles: its arithmetic (on the host, or on a GPU with `pytest -m gpu`), and that it compiles."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import cuda_on_host
import numpy as np
import pytest
import strict_cupy

from kme_dist import backend
from kme_dist.core.embedding import Decision, Embedding
from kme_dist.core.kernels import Gaussian, Laplace, Matern, Periodic, RationalQuadratic, fused

KERNELS = {
    "gaussian": Gaussian([0.7, 1.1, 2.0], scale=1.5),
    "periodic": Periodic([1.5, 2.0, 3.0], scale=0.8, period=2.5),
    "matern_12": Matern([0.7, 1.1, 2.0], scale=1.5, nu=0.5),
    "matern_32": Matern([0.7, 1.1, 2.0], scale=1.5, nu=1.5),
    "matern_52": Matern([0.7, 1.1, 2.0], scale=0.6, nu=2.5),
    "laplace": Laplace([0.7, 1.1, 2.0], scale=1.5),
}
SHAPES = [(1, 1), (7, 129), (8, 128), (21, 300)]  # below, at and above the sizes of a block
EPS = {"float32": 2.0**-24, "float64": 2.0**-53}


@pytest.fixture(params=["source on the host", pytest.param("gpu", marks=pytest.mark.gpu)])
def card(request):
    """Arrays whose tiles are finished by the CUDA source."""
    if request.param == "gpu":
        return request.getfixturevalue("gpu")
    if cuda_on_host.COMPILER is None:
        pytest.skip("no g++ to compile the CUDA source for the host")
    return request.getfixturevalue("device")


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    names, launch = [], fused.Tile._launch

    def recorded(tile, name, *rest):
        names.append(name)
        return launch(tile, name, *rest)

    monkeypatch.setattr(fused.Tile, "_launch", recorded)
    return names


def both_sides(shape, dtype, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    A, B = (rng.normal(scale=spread, size=(n, 3)).astype(dtype) for n in shape)
    B[: len(B) // 3] = A[0]  # equal rows
    return A, B


def tolerance(kernel, A, B, dtype):
    """Rounding of |z|² + |z'|² - 2 z·z' under profiles whose slope by s is at most 1.5 scale²."""
    reach = (np.abs(np.concatenate([A, B])).max() / np.min(kernel.length_scale)) ** 2 * A.shape[1]
    return 8 * EPS[dtype] * (4 + reach) * float(kernel.scale) ** 2


def prepared(kernel, A, B):
    columns = kernel.prepare(B)
    return kernel.prepare_beside(A, columns), columns


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_tiles_equal_those_of_the_host(name, shape, card, dtype, launched):
    kernel, (A, B) = KERNELS[name], both_sides(shape, dtype)
    exact = kernel.gram(A.astype(float), B.astype(float))
    found = card.host(kernel.evaluate(*prepared(kernel, card(A), card(B))))
    assert launched == ["finish"]
    assert found.dtype == dtype
    np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance(kernel, A, B, dtype))
    assert found.max() <= float(kernel.scale) ** 2 * (1 + EPS[dtype])


@pytest.mark.parametrize(
    ("name", "classes"), [*((name, 3) for name in KERNELS), *(("gaussian", m) for m in (1, 4, 5, 10, 16, 17, 32))]
)
def test_products_equal_those_of_the_host(name, classes, card, dtype, launched, rng):
    kernel, (A, B) = KERNELS[name], both_sides((21, 300), dtype)
    V, total = (rng.normal(size=size).astype(dtype) for size in ((300, classes), (21, classes)))
    exact = total + kernel.gram(A.astype(float), B.astype(float)) @ V.astype(float)
    rows = prepared(kernel, card(A), card(B))
    found = card.host(kernel.times(*rows, card(V), card(total)))
    assert launched == ["times"]
    limit = tolerance(kernel, A, B, dtype) * (1 + np.abs(V).sum(axis=0).max())
    np.testing.assert_allclose(found, exact, rtol=0, atol=limit)
    np.testing.assert_array_equal(found, card.host(kernel.times(*rows, backend.by_columns(card(V)), card(total))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_every_shape(shape, card, dtype, rng):
    kernel, (A, B) = KERNELS["gaussian"], both_sides(shape, dtype)
    V = rng.normal(size=(shape[1], 10)).astype(dtype)
    found = card.host(kernel.times(*prepared(kernel, card(A), card(B)), card(V)))
    exact = kernel.gram(A.astype(float), B.astype(float)) @ V.astype(float)
    limit = tolerance(kernel, A, B, dtype) * (1 + np.abs(V).sum(axis=0).max())
    np.testing.assert_allclose(found, exact, rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["gaussian", "matern_12", "matern_52"])
def test_near_pairs_of_far_rows_are_computed_from_differences(name, card, rng):
    """Two clusters, 400 length scales apart: no origin suits both, so expanded squares lose the distances in one."""
    kernel = KERNELS[name]
    middles = np.where(np.arange(30) % 2, 200.0, -200.0)[:, None]
    A, B = ((middles[:n] + rng.normal(scale=0.1, size=(n, 3))).astype("float32") for n in (13, 30))
    differences = (A.astype(float)[:, None] - B.astype(float)[None]) / kernel.length_scale
    exact = float(kernel.scale) ** 2 * profile(kernel, (differences**2).sum(axis=2))
    found = card.host(kernel.evaluate(*prepared(kernel, card(A), card(B))))
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-4)


def profile(kernel, s):
    if isinstance(kernel, Gaussian):
        return np.exp(-s / 2)
    a = np.sqrt(2 * kernel.nu * s)
    return np.exp(-a) * {0.5: 1, 1.5: 1 + a, 2.5: 1 + a + a * a / 3}[kernel.nu]


@pytest.mark.parametrize("name", KERNELS)
def test_equal_rows_have_the_largest_value_and_nan_stays_nan(name, card, dtype):
    kernel, (A, _) = KERNELS[name], both_sides((9, 9), dtype)
    A[4, 1] = np.nan
    K = card.host(kernel.evaluate(*prepared(kernel, card(A), card(A.copy()))))
    assert np.isnan(K[4]).all()
    assert np.isnan(K[:, 4]).all()
    rest = np.delete(np.arange(9), 4)
    exact = kernel.gram(A[rest].astype(float), A[rest].astype(float).copy())
    np.testing.assert_allclose(K[np.ix_(rest, rest)], exact, rtol=0, atol=tolerance(kernel, A[rest], A[rest], dtype))
    V = np.ones((9, 2), dtype)
    assert np.isnan(card.host(kernel.times(*prepared(kernel, card(A), card(A.copy())), card(V)))).all()


def test_no_value_exceeds_the_variance(card, dtype, rng):
    """Equal rows 40 length scales from the origin: rounding leaves some of their exponents above log scale²."""
    kernel, A = Gaussian(1.0, scale=1.5), 40 * rng.choice([-1.0, 1.0], size=(64, 3)) + rng.normal(size=(64, 3))
    A = A.astype(dtype)
    rows = prepared(kernel, card(A), card(A.copy()))
    exponents = card.host(rows[0][0] @ rows[1][1].T)
    assert (np.exp(exponents.astype(float)) > 1.5**2 * (1 + EPS[dtype])).any()
    assert (card.host(kernel.evaluate(*rows)) <= 1.5**2).all()


def test_tiles_are_written_into_a_block_of_a_larger_matrix(card, dtype):
    kernel, (A, B) = KERNELS["matern_32"], both_sides((11, 140), dtype)
    K = card(np.full((20, 160), 7.0, dtype))
    tile = K[5:16, 10:150]
    assert kernel.evaluate(*prepared(kernel, card(A), card(B)), out=tile) is tile
    found = card.host(K)
    np.testing.assert_array_equal(found[5:16, 10:150], card.host(kernel.evaluate(*prepared(kernel, card(A), card(B)))))
    assert (np.delete(np.delete(found, slice(5, 16), 0), slice(10, 150), 1) == 7).all()
    assert (found[:5] == 7).all()
    assert (found[5:16, :10] == 7).all()


def test_a_decision_sums_its_blocks_on_the_device(card, dtype, launched, monkeypatch, rng):
    monkeypatch.setattr("kme_dist.core.embedding.DEVICE_TILE", (16, 64))
    kernel, (A, B) = KERNELS["gaussian"], both_sides((40, 150), dtype)
    V = rng.normal(size=(150, 10)).astype(dtype)
    found = card.host(Decision(Embedding(kernel, card(B), card(V), 0.1), dtype)(card(A)))
    exact = Decision(Embedding(kernel, B.astype(float), V.astype(float), 0.1), "float64")(A.astype(float))
    assert launched == ["times"] * 9
    limit = tolerance(kernel, A, B, dtype) * (1 + np.abs(V).sum(axis=0).max())
    np.testing.assert_allclose(found, exact, rtol=0, atol=limit)


def test_totals_of_another_precision_or_order_are_added_to_and_wrong_shapes_refused(card, launched, rng):
    kernel, (A, B) = KERNELS["gaussian"], both_sides((5, 6), "float32")
    V, total = rng.normal(size=(6, 3)).astype("float32"), rng.normal(size=(5, 3))
    rows, exact = prepared(kernel, card(A), card(B)), total + kernel.gram(A, B).astype(float) @ V
    for given in (card(total), backend.by_columns(card(total.astype("float32")))):
        np.testing.assert_allclose(card.host(kernel.times(*rows, card(V), given)), exact, rtol=0, atol=1e-5)
    assert launched == ["times"] * 2
    with pytest.raises(ValueError, match=r"(?i)mismatch|shape|dim"):
        kernel.times(*rows, card(V[:4]))


class Half(Gaussian):
    def evaluate(self, X, X2, out=None):
        return 0.5 * super().evaluate(X, X2, out)


def test_what_the_source_does_not_cover_is_a_plain_expression(card, launched, rng):
    A, B = both_sides((5, 6), "float64")
    V = rng.normal(size=(6, 33))
    for kernel, weights in [
        (Half(2.0), V[:, :3]),
        (RationalQuadratic(2.0), V[:, :3]),
        (Gaussian(2.0), V),
        (Gaussian(2.0), V[:, :3].astype("float32")),
    ]:
        found = card.host(kernel.times(*prepared(kernel, card(A), card(B)), card(weights)))
        np.testing.assert_allclose(found, kernel.gram(A, B) @ weights, rtol=1e-12, atol=1e-12)
    assert "times" not in launched
    empty = Gaussian(2.0).times(*prepared(Gaussian(2.0), card(A[:0]), card(B)), card(V[:, :3]))
    assert card.host(empty).shape == (0, 3)


def test_a_source_that_does_not_compile_costs_speed_only(device, monkeypatch):
    def refused(code, options):
        raise RuntimeError("error: expected a ;")

    monkeypatch.setattr(strict_cupy.cuda_on_host, "library", refused)
    monkeypatch.setattr(backend, "cuda_source", lambda name: "")
    monkeypatch.setattr(fused, "SOURCE", "other.cu")
    kernel, (A, B) = KERNELS["gaussian"], both_sides((5, 6), "float64")
    with pytest.warns(UserWarning, match=r"other.cu does not compile here.*expected a ;"):
        found = device.host(kernel.gram(device(A), device(B)))
    np.testing.assert_allclose(found, kernel.gram(A, B), rtol=1e-12)
    V = np.ones((6, 5))
    with pytest.warns(UserWarning, match="other.cu does not compile here"):
        found = device.host(kernel.times(*prepared(kernel, device(A), device(B)), device(V)))
    np.testing.assert_allclose(found, kernel.gram(A, B) @ V, rtol=1e-12)


# --- the shim and the compiler see mistakes ---------------------------------------------------------


def test_the_host_notices_barriers_that_threads_skip():
    if cuda_on_host.COMPILER is None:
        pytest.skip("no g++ to compile the CUDA source for the host")
    source, options = backend.cuda_source(fused.SOURCE), fused.defines("float64", "gaussian", False, 4)
    broken = source.replace("        parts[t] = part;\n", "        parts[t] = part;\n        if (t == 3) return;\n")
    assert broken != source
    A, V, out = np.zeros((2, 5)), np.ones((5, 1)), np.zeros((2, 1))
    sizes = [np.int32(n) for n in (2, 5, 1, 5)]
    arguments = [A, np.int64(5), out, np.int64(1), V, A, A, *sizes, np.float64(1), np.float64(0)]
    kernels = cuda_on_host.library(source, options)
    cuda_on_host.launch(kernels, kernels.times, (1, 1), (fused.THREADS,), arguments)
    assert out.ravel().tolist() == [5, 5]
    kernels = cuda_on_host.library(broken, options)
    with pytest.raises(AssertionError, match="skip a barrier"):
        cuda_on_host.launch(kernels, kernels.times, (1, 1), (fused.THREADS,), arguments)


@pytest.fixture(scope="module")
def nvrtc():
    """NVIDIA's compiler for CUDA source: it needs no device."""
    package = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
    found = [
        path
        for folder in (package.submodule_search_locations or [] if package else [])
        for path in Path(folder).glob("lib/libnvrtc.so.*[0-9]")
    ]
    if not found:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")
    return ctypes.CDLL(str(found[0]))


def compile_cuda(nvrtc, source, options):
    """The size of the binary and the compiler's log; AssertionError with that log where it does not compile."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"tiles.cu", 0, None, None) == 0
    options = [option.encode() for option in options]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0
    assert not failed, log.value.decode()
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return size.value, log.value.decode()


VARIANTS = [
    ("float32", "gaussian", False, 8),
    ("float32", "matern_12", True, 16),
    ("float64", "matern_52", False, 16),
    ("float64", "laplace", False, 4),
]
OTHERS = [("float64", "gaussian", True, 16), ("float32", "matern_32", False, 4), ("float32", "laplace", False, 16)]


@pytest.mark.parametrize("card", ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90"])
def test_the_source_compiles_and_keeps_its_sums_in_registers(card, nvrtc):
    for variant in VARIANTS + OTHERS * (card == "sm_80"):
        options = ("--std=c++17", f"--gpu-architecture={card}", "--ptxas-options=-v", *fused.defines(*variant))
        size, log = compile_cuda(nvrtc, backend.cuda_source(fused.SOURCE), options)
        assert size > 1000
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
        assert len(spilled) >= 2, log
        assert not any(spilled), f"{variant} on {card}\n{log}"


def test_a_typo_fails_with_the_log_of_the_compiler(nvrtc):
    source = backend.cuda_source(fused.SOURCE)
    broken = source.replace("__syncthreads();", "__syncthreadz();", 1)
    assert broken != source
    with pytest.raises(AssertionError, match=r"tiles\.cu\(\d+\): error: identifier \"__syncthreadz\" is undefined"):
        compile_cuda(nvrtc, broken, ("--gpu-architecture=sm_80", *fused.defines(*VARIANTS[0])))


def test_sizes_in_python_are_those_of_the_source():
    source = backend.cuda_source(fused.SOURCE)
    assert f"THREADS = {fused.THREADS}, ROWS = {fused.ROWS} " in source
    for number, name in enumerate(fused.PROFILES):
        assert f"#define {name.upper()} {number}\n" in source
    from kme_dist.core.kernels.stationary import _NEAR

    assert f"R({_NEAR})" in source
