"""systemd: `deploy/systemd/install` on a fresh Debian root, which is then booted in a container of its own network.

What is on the root afterwards is what a newcomer gets who follows the guide.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from deploy_tools import DEPLOY, HOST_FILES, ROOT, call, debian_archive, tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
UNITS = sorted(path.name for ending in ("service", "timer") for path in (DEPLOY / "systemd").glob(f"*.{ending}"))
SMOKE = "kme-dist smoke --scheduler tls://127.0.0.1:8786 --folder /var/lib/kme-dist/smoke"
AS_KME = (
    "env", "KME_TLS=/etc/kme-dist/tls", "DASK_CONFIG=/etc/kme-dist/dask", "KME_ROOT=/var/lib/kme-dist",
    "PATH=/opt/kme-dist/bin:/usr/bin:/bin", "HOME=/var/lib/kme-dist",
)  # fmt: skip


class Machine:
    """A root in a folder; `inside` runs a command in it, not booted and on this host's network."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.container = [tool("systemd-nspawn"), "--quiet", "--register=no", "--keep-unit", "--directory", root]

    def inside(self, *words, **options):
        bind = f"--bind-ro={ROOT}:/usr/src/kme-dist"
        return call(*self.container, "--pipe", bind, "--resolv-conf=copy-host", "--", *words, **options)

    def install(self, *words):
        done = self.inside("/usr/src/kme-dist/deploy/systemd/install", *words, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A fresh Debian with the services installed, for three workers."""
    tool("systemd-nspawn")
    if os.geteuid() != 0:
        pytest.skip("a container needs root")
    root = Path(tmp_path_factory.mktemp("debian")) / "root"
    root.mkdir()
    assert call("tar", "--extract", "--file", debian_archive(), "--directory", root).returncode == 0
    for name in HOST_FILES:
        if Path(name).exists():
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, root / name[1:])
    one = Machine(root)
    done = one.inside("true")
    if done.returncode != 0:
        pytest.skip(f"no container can run here: {done.stderr[-300:]}")
    one.said = one.install("--workers", "3", "--memory", "1GiB")
    yield one
    shutil.rmtree(root.parent, ignore_errors=True)


# --- what the installer leaves ------------------------------------------------------------------------


def test_it_says_what_it_enabled_and_how_to_check_it(machine):
    assert "kme-dist-worker@3.service" in machine.said
    assert "kme-dist smoke" in machine.said


def test_users_folders_and_certificates_are_there_with_the_right_owners(machine):
    wanted = [
        "/var/lib/kme-dist kme:kme 700",
        "/etc/kme-dist/authority root:root 700",
        "/etc/kme-dist/authority/ca-key.pem root:root 600",
        "/etc/kme-dist/tls root:kme 750",
        "/etc/kme-dist/tls/cluster-key.pem root:kme 640",
        "/etc/kme-dist/tls/client-key.pem root:kme 640",
        "/etc/kme-dist/nightly.yaml root:root 644",
    ]
    done = machine.inside("stat", "--format=%n %U:%G %a", *(line.split()[0] for line in wanted))
    assert done.stdout.splitlines() == wanted
    assert not (machine.root / "etc/kme-dist/tls/ca-key.pem").exists(), "the authority is for root only"
    shell = machine.inside("getent", "passwd", "kme").stdout.strip().split(":")
    assert shell[-2:] == ["/var/lib/kme-dist", "/usr/sbin/nologin"]


def test_systemd_accepts_every_unit_with_its_real_programs(machine):
    names = [name.replace("@.", "@10.") for name in UNITS]
    done = machine.inside("systemd-analyze", "verify", "--man=no", *names)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "kme-dist" in line]) == (0, [])


def test_a_second_run_updates_and_keeps_what_was_changed(machine):
    """Also with fewer workers: the others are no longer started."""
    settings = machine.root / "etc/kme-dist/nightly.yaml"
    certificate = machine.root / "etc/kme-dist/tls/cluster.pem"
    before = certificate.read_bytes()
    original = settings.read_text()
    settings.write_text(f"{original}# mine\n")
    (machine.root / "etc/systemd/system/kme-dist-keep.service").write_text("[Unit]\n")
    wanted = machine.root / "etc/systemd/system/multi-user.target.wants"
    assert len(list(wanted.glob("kme-dist-worker@*"))) == 3
    machine.install("--workers", "2")
    assert sorted(path.name for path in wanted.glob("kme-dist-worker@*")) == [
        "kme-dist-worker@1.service",
        "kme-dist-worker@2.service",
    ]
    assert json.loads((machine.root / "etc/kme-dist/prometheus/targets/workers.json").read_text()) == [
        {"targets": ["127.0.0.1:8791", "127.0.0.1:8792"]}
    ]
    assert settings.read_text().endswith("# mine\n")
    assert certificate.read_bytes() == before
    keep = machine.root / "etc/systemd/system/kme-dist-keep.service"
    assert keep.read_text() == (DEPLOY / "systemd" / "kme-dist-keep.service").read_text()
    assert "KME_WORKER_MEMORY=1GiB" in (machine.root / "etc/kme-dist/worker.env").read_text()
    settings.write_text(original)


# --- booted -------------------------------------------------------------------------------------------


class Booted:
    def __init__(self, machine: Machine, process: subprocess.Popen, leader: int) -> None:
        self.machine, self.process, self.leader = machine, process, leader

    def run(self, *words, user="root", **options):
        who = ("runuser", "-u", user, "--") if user != "root" else ()
        return call("nsenter", "--target", str(self.leader), "--all", *who, *words, **options)

    def kme(self, *words, **options):
        return self.run(*AS_KME, *words, user="kme", **options)

    def journal(self, unit="kme-dist-*"):
        return self.run("journalctl", "--no-pager", "--lines=80", "--unit", unit).stdout

    def wait_for(self, what, check, seconds=90):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if check():
                return
            time.sleep(0.5)
        raise AssertionError(f"{what} not after {seconds} s\n{self.journal()}")

    def answers(self, port):
        return self.run("python3", "-c", ASK, str(port)).returncode == 0


ASK = "import sys, urllib.request as u; u.urlopen(f'http://127.0.0.1:{sys.argv[1]}/metrics', timeout=3).read()"


@pytest.fixture(scope="module")
def booted(machine):
    """The machine, running, with loopback as its only network."""
    extra = [f"--bind-ro={tool(name)}:/usr/local/bin/{name}" for name in ("prometheus",) if shutil.which(name)]
    log = (machine.root.parent / "console").open("w")
    process = subprocess.Popen(
        [*map(str, machine.container), "--boot", "--private-network", *extra],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    one = None
    try:
        for _ in range(120):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if children and one is None:
                one = Booted(machine, process, int(children[0]))
            if one and one.run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded"):
                break
            if process.poll() is not None:
                break
            time.sleep(0.5)
        else:
            one = None
        if one is None or process.poll() is not None:
            said = (machine.root.parent / "console").read_text()[-400:]
            pytest.skip(f"systemd cannot be booted in a container here: {said}")
        yield one
    finally:
        process.send_signal(signal.SIGRTMIN + 4 if one is None else signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def active(booted, unit):
    return booted.run("systemctl", "is-active", unit).stdout.strip()


def test_everything_starts_with_the_machine_and_passes_the_smoke_test(booted):
    wanted = ["kme-dist-scheduler", "kme-dist-worker@1", "kme-dist-worker@2", "kme-dist-drivers", "kme-dist-keep"]
    booted.wait_for("services", lambda: all(active(booted, unit) == "active" for unit in wanted))
    done = booted.kme(*SMOKE.split(), timeout=300)
    assert done.returncode == 0, done.stderr + booted.journal()
    assert "passed: 2 workers" in done.stdout


def test_every_worker_serves_its_metrics_where_prometheus_looks(booted):
    """Also the tenth, whose number is not a digit to append to a port."""
    assert booted.run("systemctl", "start", "kme-dist-worker@10").returncode == 0
    for port in (8787, 8791, 8792, 8800):
        booted.wait_for(f"port {port}", lambda port=port: booted.answers(port))
    booted.run("systemctl", "stop", "kme-dist-worker@10")
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed; on Debian: apt install prometheus")
    command = ["/usr/local/bin/prometheus", "--config.file=/etc/kme-dist/prometheus/prometheus.yml"]
    command += ["--storage.tsdb.path=/tmp/prometheus", "--web.listen-address=127.0.0.1:9090"]
    booted.run("systemd-run", "--unit=prometheus-of-the-test", *command)
    address = "http://127.0.0.1:9090/api/v1/query?query=up"
    query = f"import urllib.request as u; print(u.urlopen('{address}', timeout=3).read().decode())"

    def scraped():
        done = booted.run("python3", "-c", query)
        if done.returncode != 0:
            return {}
        found = json.loads(done.stdout)["data"]["result"]
        return {(r["metric"]["job"], r["metric"]["instance"]): r["value"][1] for r in found}

    wanted = {("dask-scheduler", "127.0.0.1:8787"): "1", ("dask-worker", "127.0.0.1:8791"): "1",
              ("dask-worker", "127.0.0.1:8792"): "1"}  # fmt: skip
    booted.wait_for("targets of Prometheus", lambda: scraped() == wanted)
    booted.run("systemctl", "stop", "prometheus-of-the-test")


MODEL = """
data: {source: table.zarr}
learn: {steps: 40, batch_size: 60}
output: {folder: model}
"""


def test_a_job_survives_the_scheduler(booted):
    """Killed while the job runs: scheduler and workers come back, and the job goes on without a hand."""
    from sklearn.datasets import load_wine

    home = booted.machine.root / "var/lib/kme-dist"
    (home / "model.yaml").write_text(MODEL)
    load_wine(as_frame=True).frame.to_csv(home / "wine.csv", index=False)
    done = booted.kme("sh", "-c", "cd; kme-dist ingest wine.csv table.zarr --label target --shuffle 0 --quiet")
    assert done.returncode == 0, done.stderr
    submit = "cd; kme-dist submit model.yaml --pipeline run --scheduler tls://127.0.0.1:8786 --id first"
    done = booted.kme("sh", "-c", submit, timeout=120)
    assert done.returncode == 0, done.stderr
    assert booted.run("systemctl", "kill", "--signal=KILL", "kme-dist-scheduler").returncode == 0

    def state():
        done = booted.kme("kme-dist", "jobs", "status", "first", "--json")
        return json.loads(done.stdout)["state"] if done.returncode == 0 else None

    booted.wait_for("the job", lambda: state() == "succeeded", seconds=300)
    restarts = booted.run("systemctl", "show", "--property=NRestarts", "--value", "kme-dist-scheduler").stdout
    assert int(restarts) >= 1


def test_the_night_scores_new_rows_once(booted):
    """`systemctl start` of the nightly service, twice on one day."""
    config = yaml.safe_load((DEPLOY / "nightly.yaml").read_text())["predict"]
    ingest = f"kme-dist ingest wine.csv {config['data']} --exclude target --quiet"
    done = booted.kme("sh", "-c", f"cd; cp -r model/model.zarr {config['model']} && {ingest}")
    assert done.returncode == 0, done.stderr
    for _ in range(2):
        done = booted.run("systemctl", "start", "kme-dist-nightly.service", timeout=300)
        assert done.returncode == 0, booted.journal("kme-dist-nightly.service")
    assert "already done" in booted.journal("kme-dist-nightly.service")
    done = booted.kme("kme-dist", "inspect", f"/var/lib/kme-dist/{config['out']}", "--verify")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b178\b", done.stdout)


def test_the_timer_of_the_night_can_be_enabled(booted):
    assert booted.run("systemctl", "enable", "--now", "kme-dist-nightly.timer").returncode == 0
    listed = booted.run("systemctl", "list-timers", "--no-pager", "kme-dist-nightly.timer").stdout
    assert "kme-dist-nightly.service" in listed
    booted.run("systemctl", "disable", "--now", "kme-dist-nightly.timer")
