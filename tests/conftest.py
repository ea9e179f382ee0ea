"""What all tests share: the array libraries that the mathematics must run on, seeded data, and an S3 server.

`arrays` is the heart of it: one fixture, three libraries. A test that takes it makes its arrays with `arrays(...)`,
looks at results with `arrays.host(...)`, and so states its promise for NumPy, for a GPU (through a stand-in that is
stricter than a GPU) and for any library that follows the array API standard (on a device that is not the host). With
`pytest -m gpu` the same tests run on a real device.
"""

from __future__ import annotations

import os
import signal
import sys
import urllib.request
import uuid
from pathlib import Path

import array_api_strict
import cuda_on_host
import dask
import distributed
import numpy as np
import pytest
import strict_cupy
from hypothesis import settings

from kme_dist import backend
from kme_dist.core.kernels import fused

# The same examples in every run, so that a red run is the change's fault; KME_FUZZ=1 looks for new ones.
settings.register_profile("repeatable", derandomize=True)
if not os.environ.get("KME_FUZZ"):
    settings.load_profile("repeatable")

# A process that was started in the background of a shell ignores ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One process more than cores: tests that wait for processes of their own leave a core to others."""
    return backend.available_cores() + 1


class HostArrays:
    name = "numpy"

    def __call__(self, values, dtype=None):
        return np.asarray(values, dtype=dtype)

    def host(self, array):
        assert isinstance(array, np.ndarray | np.generic), f"left the library: {type(array)}"
        return np.asarray(array)


class DeviceArrays:
    name = "strict cupy"

    def __call__(self, values, dtype=None):
        return strict_cupy.cupy.asarray(np.asarray(values, dtype=dtype))

    def host(self, array):
        assert isinstance(array, strict_cupy.ndarray), f"left the device: {type(array)}"
        return array.get()


class GpuArrays:
    name = "cupy"

    def __call__(self, values, dtype=None):
        return backend.to_device(np.asarray(values, dtype=dtype), "cupy")

    def host(self, array):
        assert backend.is_cupy(array), f"left the device: {type(array)}"
        return array.get()


class StandardArrays:
    name = "array API"
    device = array_api_strict.Device("device1")

    def __call__(self, values, dtype=None):
        return array_api_strict.asarray(np.array(values, dtype=dtype), device=self.device)

    def host(self, array):
        assert array.device == self.device, f"left the device: {array.device}"
        return backend.to_host(array)


@pytest.fixture
def device(monkeypatch):
    """CuPy's place taken by the strict stand-in, for this test."""
    for name, module in strict_cupy.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    if cuda_on_host.COMPILER is None:  # tests of the CUDA source itself are skipped
        monkeypatch.setattr(fused, "usable", lambda reference: False)
    return DeviceArrays()


@pytest.fixture(params=["numpy", "cupy", "standard", pytest.param("gpu", marks=pytest.mark.gpu)])
def arrays(request):
    """A function from host values to an array of the library under test; see the top of this file."""
    match request.param:
        case "numpy":
            return HostArrays()
        case "cupy":
            return request.getfixturevalue("device")
        case "standard":
            return StandardArrays()
    return request.getfixturevalue("gpu")


@pytest.fixture
def gpu():
    if not backend.gpu_available():  # that cupy imports proves nothing
        pytest.skip("no CUDA device, or cupy is not installed")
    return GpuArrays()


@pytest.fixture(params=["float64", "float32"])
def dtype(request):
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(20)


@pytest.fixture(autouse=True)
def no_closed_scheduler():
    """Clients of fixtures that are not closed in the reverse order of their start leave Dask's default scheduler set to
    one that is closed, and collections of later tests would ask for it."""
    if dask.config.get("scheduler", None) == "dask.distributed":
        try:
            distributed.default_client()
        except ValueError:
            dask.config.set(scheduler=None)


@pytest.fixture(scope="session")
def shared_data():
    """A function from the name of a shared data set to its arrays X, y; skips where the data are absent."""
    folder = Path(os.environ.get("KME_DATA", Path(__file__).parents[2] / "shared" / "data"))

    def read(name):
        path = folder / f"{name}.npz"
        if not path.exists():
            pytest.skip(f"data set {name!r} not found in {folder}; set KME_DATA to the folder that holds it")
        with np.load(path, allow_pickle=False) as found:
            return found["X"], found["y"]

    return read


@pytest.fixture(scope="session")
def s3_server():
    """The address of an S3 server that runs in this process."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch) -> str:
    """A fresh bucket as s3:// address, with the environment that reaches it."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "KME_STORE_RETRIES": "2",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(f"{s3_server}/{name}", method="PUT")
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200
    return f"s3://{name}"
