"""Clusters: started with one core for each worker, found at an address, refused with one clear line."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import strict_cupy
from ports import free_port

from kme_dist import backend
from kme_dist.backend import available_cores
from kme_dist.config import ClusterConfig, TlsConfig
from kme_dist.errors import ConfigError, RetryError
from kme_dist.ops import cluster
from kme_dist.ops.cluster import open_client, open_executor, worker_count
from kme_dist.pipelines.doctor import examine
from kme_dist.run.executors import DaskExecutor, SerialExecutor

# A scheduler and one worker in a process of their own; their address is the first line of its output.
ELSEWHERE = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=int(sys.argv[1]), threads_per_worker=1, processes=False, protocol="tcp",
                      dashboard_address=":0") as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def elsewhere():
    """A function that starts a cluster in another process and returns (address, process)."""
    started = []

    def start(workers=1, before=""):
        command = [sys.executable, "-c", ELSEWHERE.replace("import sys\n", f"import sys\n{before}\n", 1), str(workers)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started.append(process)
        return process.stdout.readline().strip(), process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_serial_means_no_cluster():
    with open_executor(ClusterConfig(kind="serial")) as executor:
        assert isinstance(executor, SerialExecutor)


def _environment(name):
    return os.environ.get(name)


def test_workers_keep_the_memory_of_a_tile_for_the_next_one(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")  # as any other cluster of this process leaves it
    with open_executor(ClusterConfig(workers=1, dashboard=False)) as executor:
        (kept,) = executor.map(_environment, [("MALLOC_TRIM_THRESHOLD_",)], name="look")
        assert int(kept) == 256 << 20
        assert executor.solo_threads == 1, "threads of a call that has the machine to itself"


def test_a_local_cluster_never_has_more_threads_than_there_are_cores():
    assert worker_count(ClusterConfig()) == available_cores()
    assert worker_count(ClusterConfig(workers=1)) == 1
    with pytest.raises(ConfigError, match=r"cluster\.workers is 1000, but there are \d+ cores"):
        worker_count(ClusterConfig(workers=1000))
    with open_executor(ClusterConfig(workers=1, dashboard=False, memory="1GiB")) as executor:
        workers = executor.client.scheduler_info(n_workers=-1)["workers"].values()
        assert [(worker["nthreads"], worker["memory_limit"]) for worker in workers] == [(1, 2**30)]
        assert executor.map(os.getpid, [()], name="pid") != [os.getpid()]


def test_a_running_cluster_is_found_and_left_running(elsewhere):
    address, process = elsewhere()
    for _ in range(2):
        with open_executor(ClusterConfig(kind="address", address=address)) as executor:
            assert executor.map(os.getpid, [()], name="pid") == [process.pid]


@pytest.mark.chaos(6)
def test_a_scheduler_that_dies_in_a_round_is_a_reason_to_try_again(elsewhere):
    address, process = elsewhere()
    with open_executor(ClusterConfig(kind="address", address=address, patience_s=0.5)) as executor:
        pid = executor.map(os.getpid, [()], name="pid")[0]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert pid == process.pid
        with pytest.raises(RetryError, match="scheduler"):
            executor.map(os.getpid, [()], name="pid")


@pytest.mark.chaos(27)
def test_other_versions_are_refused(elsewhere, monkeypatch):
    address, _ = elsewhere()
    real = cluster.versions()
    monkeypatch.setattr(cluster, "versions", lambda: real)
    with open_client(ClusterConfig(kind="address", address=address)) as client:
        # The workers report what they have; this process claims something else.
        monkeypatch.setattr(client, "run", lambda *a, **k: {"tcp://w:1": {**real, "numpy": "1.0"}})
        with pytest.raises(ConfigError, match=r"worker tcp://w:1 has numpy 1\.0, this process has"):
            cluster.check_versions(client)
        monkeypatch.setattr(client, "run", lambda *a, **k: {"tcp://w:1": ModuleNotFoundError("no kme_dist")})
        with pytest.raises(ConfigError, match="cannot run kme-dist"):
            cluster.check_versions(client)
        monkeypatch.setattr(client, "run", lambda *a, **k: {"tcp://w:1": real})
        monkeypatch.setattr(client, "run_on_scheduler", lambda *a: {**real, "dask": "1.0"})
        with pytest.raises(ConfigError, match=r"the scheduler at tcp://.* has dask 1\.0, this process has"):
            cluster.check_versions(client)


def test_a_scheduler_without_this_package_is_named(elsewhere):
    """A scheduler process that cannot import kme_dist: `versions` does not even unpickle there."""
    address, _ = elsewhere(workers=0, before="sys.modules['kme_dist'] = None")
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny"]
    with subprocess.Popen([*worker, "--no-dashboard"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with (
                pytest.raises(ConfigError, match=r"the scheduler at tcp://.* cannot run kme-dist \("),
                open_client(ClusterConfig(kind="address", address=address)),
            ):
                pass
            problem = examine(scheduler=address)["problems"][-1]
            assert problem.startswith(f"the scheduler at {address} cannot run kme-dist")
        finally:
            process.terminate()


def test_the_doctor_says_try_again_for_a_scheduler_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    report = examine(scheduler=f"tcp://127.0.0.1:{free_port()}")
    assert [report["exit_code"], len(report["problems"])] == [75, 1]
    assert examine(scheduler="nonsense://here")["exit_code"] == 2


def test_a_cluster_without_workers_is_not_waited_for_in_vain(elsewhere, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1.0)
    address, _ = elsewhere(workers=0)
    with pytest.raises(RetryError, match="has no worker"), open_client(ClusterConfig(kind="address", address=address)):
        pass


@pytest.mark.parametrize(
    ("settings", "error", "line"),
    [
        ({}, ConfigError, r"cluster\.address is missing"),
        ({"address": "nonsense://here"}, ConfigError, "is not the address of a scheduler"),
        ({"address": "tcp://127.0.0.1:1"}, RetryError, "no scheduler answers at tcp://127.0.0.1:1"),
        ({"address": "tls://127.0.0.1:1"}, ConfigError, r"requires cluster\.tls"),
        (
            {"address": "tcp://127.0.0.1:1", "tls": TlsConfig(authority=__file__, certificate=__file__, key=__file__)},
            ConfigError,
            r"certificates were given .* connect to tls://127\.0\.0\.1:1",
        ),
        (
            {"address": "tls://127.0.0.1:1", "tls": TlsConfig(authority="absent.pem", certificate="c", key="k")},
            ConfigError,
            r"cluster\.tls\.authority: absent\.pem does not exist",
        ),
    ],
)
def test_what_cannot_be_reached_is_named(settings, error, line, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1.0)
    with pytest.raises(error, match=line), open_client(ClusterConfig(kind="address", **settings)):
        pass


def test_the_command_keeps_a_cluster_up_until_it_is_told_to_stop():
    command = [sys.executable, "-m", "kme_dist", "cluster", "--workers", "1", "--json", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process:
        printed = ""
        while not printed.rstrip().endswith("}") and process.poll() is None:
            printed += process.stdout.readline()
        address = json.loads(printed)["scheduler"]
        with open_executor(ClusterConfig(kind="address", address=address)) as executor:
            assert executor.map(os.getpid, [()], name="pid") != [process.pid], "a worker process did it"
        process.terminate()
        assert process.wait(timeout=60) == 0


# --- clusters that other software starts: what it is asked for ---------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Stand-ins for libraries that start clusters: what they were called with."""
    calls = {}

    def stand_in(module, name, **methods):
        def make(*arguments, **keywords):
            calls[name] = (arguments, keywords)
            return types.SimpleNamespace(scale=lambda n: calls.setdefault("scale", n), **methods)

        found = types.ModuleType(module)
        setattr(found, name, make)
        monkeypatch.setitem(sys.modules, module, found)
        return calls

    return stand_in


def test_a_cuda_cluster_has_a_worker_for_each_device_with_a_pool_that_cupy_shares(started):
    calls = started("dask_cuda", "LocalCUDACluster")
    cluster._start(ClusterConfig(kind="local-cuda"))
    _, keywords = calls["LocalCUDACluster"]
    assert (keywords["n_workers"], keywords["threads_per_worker"], keywords["resources"]) == (None, 1, {"GPU": 1})
    assert "rmm_pool_size" not in keywords
    settings = {"workers": 2, "memory_pool": "10GiB", "device_memory": 0.7, "memory": "8GiB"}
    cluster._start(ClusterConfig(kind="local-cuda", **settings))
    _, keywords = calls["LocalCUDACluster"]
    assert (keywords["n_workers"], keywords["memory_limit"]) == (2, "8GiB")
    assert (keywords["rmm_pool_size"], keywords["device_memory_limit"]) == ("10GiB", 0.7)
    assert keywords["rmm_allocator_external_lib_list"] == "cupy"


def test_workers_allocate_no_more_device_memory_than_configured(device, monkeypatch):
    """On workers in this process, so that the substitute for CuPy is theirs too."""
    from distributed import Client, LocalCluster

    monkeypatch.setattr(strict_cupy, "_pool", strict_cupy.MemoryPool())
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as local, Client(local) as client:
        cluster._limit_devices(client, ClusterConfig(kind="local-cuda"))
        assert client.submit(backend.free_bytes, "cupy", pure=False).result() == 7 << 30
        cluster._limit_devices(client, ClusterConfig(kind="local-cuda", device_memory="12GiB", memory_pool="10GiB"))
        assert strict_cupy._pool.get_limit() == 0
        cluster._limit_devices(client, ClusterConfig(kind="local-cuda", device_memory="3GiB"))
        assert client.submit(backend.free_bytes, "cupy", pure=False).result() == 2 << 30
        with pytest.raises(ConfigError, match=r"cluster.device_memory is 'much'; must be a size such as 2GiB"):
            cluster._limit_devices(client, ClusterConfig(kind="local-cuda", device_memory="much"))


def test_a_library_for_one_kind_of_cluster_leaves_ctrl_c_alone():
    """dask-jobqueue answers it with exit code 0 from its import on; in a fresh process, where that is still to come."""
    if importlib.util.find_spec("dask_jobqueue") is None:
        pytest.skip("dask-jobqueue is not installed")
    script = (
        "import signal, sys; from kme_dist.ops import cluster; before = signal.getsignal(signal.SIGINT);"
        "cluster._optional_import('dask_jobqueue', 'dask-jobqueue', 'jobqueue');"
        "assert 'dask_jobqueue.runner' in sys.modules; assert signal.getsignal(signal.SIGINT) is before"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_slurm_job_starts_one_worker_on_one_core():
    if importlib.util.find_spec("dask_jobqueue") is None:
        pytest.skip("dask-jobqueue is not installed")
    settings = {"memory": "4GiB", "queue": "gpu", "account": "kme", "walltime": "02:00:00", "gpus": 1}
    more = {"directives": ["--constraint=a100"], "prologue": ["source /opt/kme/bin/activate"]}
    with cluster._slurm_cluster(ClusterConfig(kind="slurm", dashboard=False, **settings, **more)) as started:
        script = started.job_script()
    for line in ("-p gpu", "-A kme", "-t 02:00:00", "--cpus-per-task=1", "--gres=gpu:1", "--constraint=a100"):
        assert f"#SBATCH {line}\n" in script
    assert "export OPENBLAS_NUM_THREADS=1\n" in script
    assert "export MALLOC_TRIM_THRESHOLD_=268435456\n" in script
    assert script.index("OPENBLAS_NUM_THREADS") < script.index("activate") < script.index("distributed.cli.dask_worker")
    assert "--nthreads 1" in script
    assert "--resources GPU=1" in script
    assert "--memory-limit 4.00GiB" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_kubernetes_cluster_has_limits_and_no_gpu_for_its_scheduler():
    pytest.importorskip("dask_kubernetes")
    plain = ClusterConfig(kind="kubernetes", image="registry/kme:1", memory="4GiB", workers=3)
    resource = cluster.kubernetes_resource(plain)
    assert resource["kind"] == "DaskCluster"
    worker = resource["spec"]["worker"]
    container = worker["spec"]["containers"][0]
    assert (worker["replicas"], container["image"]) == (3, "registry/kme:1")
    assert container["resources"]["limits"] == {"cpu": "1", "memory": str(4 * 2**30)}
    assert container["args"][:3] == ["dask-worker", "--nthreads", "1"]
    assert {"name": "OPENBLAS_NUM_THREADS", "value": "1"} in container["env"]
    assert {"name": "MALLOC_TRIM_THRESHOLD_", "value": "268435456"} in container["env"]
    device = cluster.kubernetes_resource(plain.model_copy(update={"gpus": 1}))
    container = device["spec"]["worker"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["args"][:3] == ["dask-cuda-worker", "--resources", "GPU=1"]
    scheduler = device["spec"]["scheduler"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in scheduler["resources"]["limits"]


def test_the_kubernetes_resource_is_what_the_operator_takes():
    """Against the definitions that the operator itself installs."""
    operator = pytest.importorskip("dask_kubernetes")
    jsonschema = pytest.importorskip("jsonschema")
    from pathlib import Path

    import yaml

    chart = Path(operator.__file__).parent / "operator" / "deployment" / "helm" / "dask-kubernetes-operator"
    found = yaml.load((chart / "crds" / "daskcluster.yaml").read_text(), Loader=yaml.CSafeLoader)  # long
    schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for gpus in (0, 1):
        settings = ClusterConfig(kind="kubernetes", image="registry/kme:1", memory="4GiB", gpus=gpus)
        jsonschema.validate(cluster.kubernetes_resource(settings), schema)


def test_a_gateway_is_asked_for_a_cluster_with_its_options(started):
    asked = {}

    def new_cluster(**options):
        asked.update(options)
        return types.SimpleNamespace(scale=lambda n: asked.update(workers=n))

    started("dask_gateway", "Gateway", new_cluster=new_cluster)
    address = {"kind": "gateway", "address": "https://gateway"}
    cluster._start(ClusterConfig(**address, workers=4, options={"worker_cores": 1}))
    assert asked == {"worker_cores": 1, "workers": 4}


@pytest.mark.parametrize(
    ("kind", "module", "extra", "settings"),
    [
        ("local-cuda", "dask_cuda", "gpu", {}),
        ("slurm", "dask_jobqueue", "jobqueue", {"memory": "1GiB"}),
        ("kubernetes", "dask_kubernetes.operator", "k8s", {"memory": "1GiB", "image": "i"}),
        ("gateway", "dask_gateway", "k8s", {"address": "https://gateway"}),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command(kind, module, extra, settings, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'kme-dist\[{extra}\]'"):
        cluster._start(ClusterConfig(kind=kind, **settings))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"kind": "slurm"}, r"cluster\.kind is slurm: cluster\.memory is missing"),
        ({"kind": "kubernetes"}, r"cluster\.image is missing"),
        ({"kind": "kubernetes", "image": "i", "memory": "lots"}, r"cluster\.memory is 'lots'"),
        ({"kind": "gateway"}, r"cluster\.address is missing"),
        ({"kind": "gateway", "address": "http://far.example.org"}, r"cluster\.insecure: true"),
    ],
)
def test_what_a_kind_of_cluster_needs_is_asked_for(settings, line):
    pytest.importorskip("dask_kubernetes")
    with pytest.raises(ConfigError, match=line):
        cluster._start(ClusterConfig(**settings))


# --- in the clear, on this machine only ---------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:8786", "tcp://localhost:8786", "tcp://[::1]:8786", "tls://far:1"])
def test_addresses_that_nobody_else_can_listen_to(address):
    cluster.refuse_plain(address, insecure=False)


@pytest.mark.parametrize("address", ["tcp://10.0.0.5:8786", "scheduler:8786", "ucx://10.0.0.5:8786", "ws://far:1"])
def test_a_plain_address_on_another_machine_is_refused_unless_told(address):
    cluster.refuse_plain(address, insecure=True)
    with pytest.raises(ConfigError, match=r"not encrypted.*cluster\.insecure: true"):
        cluster.refuse_plain(address, insecure=False)
    with (
        pytest.raises(ConfigError, match=r"not encrypted.*cluster\.insecure: true"),
        open_client(ClusterConfig(kind="address", address=address)),
    ):
        pass


# --- devices ------------------------------------------------------------------------------------------


def test_who_computes_where():
    class Workers(DaskExecutor):
        gpus = 0

    without, with_gpus = Workers(None), Workers(None)
    with_gpus.gpus = 2
    assert cluster.backend_of(without, "auto") == cluster.backend_of(with_gpus, "numpy") == "numpy"
    assert cluster.backend_of(with_gpus, "auto") == cluster.backend_of(with_gpus, "cupy") == "cupy"
    assert cluster.backend_of(SerialExecutor(), "numpy") == "numpy"
    with pytest.raises(ConfigError, match="no worker has the resource GPU"):
        cluster.backend_of(without, "cupy")


def test_tasks_that_ask_for_a_gpu_run_where_the_command_line_says_there_is_one():
    """A scheduler and two workers as an operator would start them, one with `--resources GPU=1`."""
    processes = []

    def begin(what, *arguments):
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        folder = Path(__file__).parent  # of the functions at the end of this file; ports.py is one above
        here = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder.parent}"}
        processes.append(subprocess.Popen(command, env=here, **quiet))
        return processes[-1]

    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    common = ["--host", "127.0.0.1", "--no-dashboard"]
    try:
        begin("scheduler", *common, "--port", str(port))
        device = begin("worker", address, *common, "--no-nanny", "--nthreads", "1", "--resources", "GPU=1")
        reader = begin("worker", address, *common, "--no-nanny", "--nthreads", "1")
        with open_executor(ClusterConfig(kind="address", address=address)) as executor:
            executor.client.wait_for_workers(2, timeout=60)
            executor._count_again = 0.0  # look again, now that both are there
            assert (executor.workers, executor.gpus, executor.has_readers) == (2, 1, True)
            assert set(executor.map(os.getpid, [()] * 4, name="compute", gpu=True)) == {device.pid}
            reads = [(i,) for i in range(4)]
            found = executor.map(both_processes, [()] * 4, name="compute", gpu=True, feed=(pid_of, reads, [], "read"))
            assert {computed_by for computed_by, _ in found} == {device.pid}
            assert reader.pid in {read_by for _, read_by in found}, "the one with the GPU may help when it is idle"
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def pid_of(number):
    return os.getpid()


def both_processes(read_by):
    return os.getpid(), read_by


def test_where_nothing_listens_a_client_gives_up_in_a_few_seconds():
    began = time.monotonic()
    with pytest.raises(RetryError, match=r"no scheduler answers at tcp://127.0.0.1:1 \(ConnectionRefusedError\)"):
        cluster.open_unchecked(ClusterConfig(kind="address", address="tcp://127.0.0.1:1"))
    assert time.monotonic() - began < 8
