"""Two hosts and a wire: network namespaces joined by a veth pair, TLS, and a link that goes down for a minute.

    host A, the laptop      10.77.0.1        host B, the cluster     10.77.0.2

Needs root and `ip`. The disk is shared, as it is between a laptop and a cluster that mount the same store.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from kme_dist.data.ingest import ingest
from kme_dist.data.store import load_arrays
from kme_dist.ops import jobs
from kme_dist.ops.certs import make_certificates

MINUTE = 60.0
STEPS = 2500
LISTEN = "10.77.0.2:8786"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def can_make_hosts():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = ["ip", "netns", "add", f"kme-probe-{os.getpid()}"]
    made = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    subprocess.run([*probe[:2], "del", probe[3]], capture_output=True, check=False)
    return made


class Hosts:
    """Two network namespaces; `on("a", ...)` runs a command of kme-dist there."""

    def __init__(self, folder):
        self.folder, self.spaces = folder, {side: f"kme{os.getpid()}{side}" for side in "ab"}
        self.running = []

    def ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def __enter__(self):
        for side, space in self.spaces.items():
            self.ip("netns", "add", space)
            self.ip("-n", space, "link", "set", "lo", "up")
            if side == "a":
                self.ip("-n", space, "link", "add", "wire", "type", "veth", "peer", "name", "wire2")
        self.ip("-n", self.spaces["a"], "link", "set", "wire2", "netns", self.spaces["b"], "name", "wire")
        for number, space in enumerate(self.spaces.values(), start=1):
            self.ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            self.ip("-n", space, "link", "set", "wire", "up")
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            process.kill()
            process.wait()
            process.stdout.close()
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def wire(self, state):
        self.ip("-n", self.spaces["a"], "link", "set", "wire", state)

    def command(self, side, *arguments):
        return ["ip", "netns", "exec", self.spaces[side], sys.executable, "-m", "kme_dist", *map(str, arguments)]

    def on(self, side, *arguments):
        """(exit code, stdout, stderr) of a command on one host."""
        done = subprocess.run(
            self.command(side, *arguments), capture_output=True, text=True, check=False, env=environment()
        )
        return done.returncode, done.stdout, done.stderr

    def keep(self, side, *arguments):
        process = subprocess.Popen(
            self.command(side, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        self.running.append(process)
        return process


def environment():
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def hosts(tmp_path):
    if not can_make_hosts():
        pytest.skip("network namespaces cannot be made here: that needs root, `ip` and a kernel that allows it")
    with Hosts(tmp_path) as made:
        yield made


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    X = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    ingest((X, (X[:, 0] + X[:, 1] ** 2 > 0.5).astype(int)), root / "table.zarr")
    (root / "learn.yaml").write_text(
        "data: {source: table.zarr}\n"
        "model: {objective: rcb}\n"
        f"learn: {{steps: {STEPS}, batch_size: 100, checkpoint_steps: 50}}\n"
        "cluster: {kind: serial}\n"
    )
    return root


def learned(folder):
    arrays, attributes = load_arrays(folder / "learned.zarr")
    return {name: array.tobytes() for name, array in arrays.items()}, attributes["kernel"], attributes["regularization"]


def test_a_job_ends_right_while_the_laptop_is_gone_and_the_wire_is_cut(hosts, root, tmp_path):
    certificates = tmp_path / "certs"
    make_certificates(certificates)
    cluster = hosts.keep("b", "cluster", "--workers", "2", "--tls", certificates, "--listen", LISTEN, "--quiet")
    address = re.search(r"tls://10\.77\.0\.2:\d+", cluster.stdout.readline())[0]
    to_cluster = ["--scheduler", address, "--tls", certificates]

    # Whoever has no certificate of this authority gets nowhere, with one line.
    make_certificates(tmp_path / "foreign")
    submit = ["submit", root / "learn.yaml", "--pipeline", "learn", "--root", root, "--quiet"]
    code, _, line = hosts.on("a", *submit, "--scheduler", address, "--tls", tmp_path / "foreign")
    assert (code, line.count("\n")) == (75, 1), line
    code, _, line = hosts.on("a", *submit, "--scheduler", address)
    assert (code, line.count("\n")) == (2, 1), line
    plain = address.replace("tls", "tcp")
    code, _, line = hosts.on("a", *submit, "--scheduler", plain)
    assert (code, line.count("\n")) == (2, 1), line
    code, _, line = hosts.on("a", *submit, "--scheduler", plain, "--allow-insecure")
    assert (code, line.count("\n")) == (75, 1), line

    code, out, err = hosts.on("a", *submit, *to_cluster)  # the process on the laptop ends here
    assert code == 0, err
    job = jobs.job_at(root, out.strip())

    def steps_done():
        return (job.status().get("progress") or {}).get("done") or 0

    while steps_done() < 20:
        assert job.status()["state"] in ("waiting", "running"), job.status()
        time.sleep(0.2)
    hosts.wire("down")
    before = steps_done()
    code, _, line = hosts.on("a", "jobs", "status", job.id, "--root", root, *to_cluster)
    assert (code, line.count("\n")) == (75, 1), "nobody can be asked while the wire is cut"
    code, out, err = hosts.on("a", "jobs", "status", job.id, "--root", root, "--json")
    assert code == 0, err
    assert json.loads(out)["state"] in ("running", "succeeded"), "but the store can"
    time.sleep(MINUTE)
    assert job.status()["state"] == "succeeded" or steps_done() > before
    hosts.wire("up")

    code, out, err = hosts.on("a", "jobs", "wait", job.id, "--root", root, "--timeout", "500", "--quiet")
    assert code == 0, err
    code, out, err = hosts.on("a", "jobs", "status", job.id, "--root", root, "--json", *to_cluster)
    assert code == 0, err
    status = json.loads(out)
    assert (status["state"], status["drivers"], status["result"]["steps"]) == ("succeeded", 1, STEPS)
    code, out, _ = hosts.on("a", "jobs", "logs", job.id, "--root", root)
    assert out.splitlines()[-1].endswith("succeeded")

    # The right end: what one process alone learns from the same config, to the last bit.
    alone = ["learn", root / "learn.yaml", "--quiet", "--set", f"output.folder={tmp_path / 'alone'}"]
    code, _, err = hosts.on("a", *alone, "--set", f"data.source={root / 'table.zarr'}")
    assert code == 0, err
    assert learned(job.folder / "output") == learned(tmp_path / "alone")


def test_a_driver_cut_off_from_its_scheduler_is_replaced_by_one_on_the_other_side(hosts, root, tmp_path):
    """The driver runs on A, all else on B. The wire is cut for good: a driver on B goes on, and A's never commits."""
    certificates = tmp_path / "certs"
    make_certificates(certificates)
    files = ["--tls-ca-file", certificates / "ca.pem", "--tls-cert", certificates / "cluster.pem"]
    files += ["--tls-key", certificates / "cluster-key.pem"]

    def dask(side, *arguments):
        command = ["ip", "netns", "exec", hosts.spaces[side], sys.executable, "-m", "dask", *map(str, arguments)]
        log = (tmp_path / f"{len(hosts.running)}.log").open("w")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment(), text=True)
        log.close()
        hosts.running.append(process)

    address = f"tls://{LISTEN}"
    dask("b", "scheduler", "--host", address, "--dashboard-address", "127.0.0.1:0", *files)
    worker = ["worker", address, "--nthreads", "1", "--dashboard-address", "127.0.0.1:0", *files]
    dask("b", *worker, "--host", "10.77.0.2")
    drivers = ["drivers", "--scheduler", address, "--tls", certificates, "--root", root, "--quiet"]
    hosts.keep("a", *drivers)
    submit = ["submit", root / "learn.yaml", "--pipeline", "learn", "--root", root, "--quiet"]
    deadline = time.monotonic() + 240
    while (answer := hosts.on("b", *submit, "--scheduler", address, "--tls", certificates))[0] == 75:
        assert time.monotonic() < deadline, answer
    assert answer[0] == 0, answer
    job = jobs.job_at(root, answer[1].strip())
    while ((job.status().get("progress") or {}).get("done") or 0) < 20:
        assert job.status()["state"] in ("waiting", "running", "retrying"), job.status()
        time.sleep(0.2)
    hosts.keep("b", *drivers)
    while ((job.status().get("progress") or {}).get("done") or 0) < 60:
        assert job.status()["state"] in ("waiting", "running", "retrying"), job.status()
        time.sleep(0.2)
    hosts.wire("down")
    code, _, err = hosts.on("b", "jobs", "wait", job.id, "--root", root, "--timeout", "500", "--quiet")
    assert code == 0, (err, job.events())
    assert job.result()["epoch"] > 1
    assert job.result()["result"]["steps_now"] < STEPS, "it resumes from a checkpoint"
    assert [event["state"] for event in job.events()].count("succeeded") == 1
    alone = ["learn", root / "learn.yaml", "--quiet", "--set", f"output.folder={tmp_path / 'alone'}"]
    code, _, err = hosts.on("b", *alone, "--set", f"data.source={root / 'table.zarr'}")
    assert code == 0, err
    assert learned(job.folder / "output") == learned(tmp_path / "alone")
