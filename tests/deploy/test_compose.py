"""The compose file: fits the specification, listens on loopback only, encrypts, and retries as the exit codes say."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from deploy_tools import DEPLOY, call, tool
from ports import free_port

PATH = DEPLOY / "compose.yaml"


@pytest.fixture
def compose():
    return yaml.safe_load(PATH.read_text(encoding="utf-8"))


def test_it_fits_the_specification(tmp_path):
    check = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    assert call(*check, PATH).returncode == 0
    broken = tmp_path / "compose.yaml"
    broken.write_text(PATH.read_text().replace("depends_on:", "depend_on:"))
    done = call(*check, broken)
    assert done.returncode == 1
    assert "depend_on" in done.stdout


def test_it_has_scheduler_workers_drivers_and_store(compose):
    assert {"scheduler", "worker", "drivers", "store", "smoke", "nightly"} <= set(compose["services"])
    assert compose["services"]["worker"]["deploy"]["replicas"] == 2
    assert compose["services"]["drivers"]["command"][:2] == ["kme-dist", "drivers"]


def test_nothing_that_up_starts_ends_by_itself(compose):
    """`up --wait` takes the end of a service for a failure; what runs once has a profile, and starts when asked for."""
    started = {name: service for name, service in compose["services"].items() if "profiles" not in service}
    assert set(started) == {"scheduler", "worker", "drivers", "store"}
    assert all(service["restart"] in ("always", "unless-stopped") for service in started.values())
    for service in started.values():
        assert set(service.get("depends_on", ())) <= set(started), "a dependency starts whatever its profile"
        assert "healthcheck" in service, "the image has HEALTHCHECK NONE, which `up --wait` takes for an error"


def ours(compose):
    return {name: service for name, service in compose["services"].items() if "build" in service}


def test_all_our_services_share_one_image(compose):
    assert len(ours(compose)) == 5
    assert len({service["image"] for service in ours(compose).values()}) == 1


def test_nothing_listens_beyond_this_machine(compose):
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_services_have_no_rights(compose):
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for service in ours(compose).values():
        assert service["read_only"] is True
        assert not service["user"].startswith("0")
        assert any(entry.startswith("/scratch:") for entry in service["tmpfs"]), "nowhere to write"


def test_no_secret_stands_in_the_file(compose):
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            if "SECRET" in name or "PASSWORD" in name:
                assert value.startswith("${KME_STORE_SECRET:?"), "refuses to start without one"
    assert compose["secrets"]["authority"]["file"].startswith("${KME_CERTS:?")


def test_the_key_of_the_authority_stays_outside(compose):
    assert not any("ca-key" in secret["file"] for secret in compose["secrets"].values())


@pytest.mark.parametrize("name", ["scheduler", "worker", "drivers", "smoke", "nightly"])
def test_every_process_speaks_tls_with_its_own_certificate(compose, name):
    service = compose["services"][name]
    targets = {secret["target"].rsplit("/", 1)[1] for secret in service["secrets"]}
    role = "cluster" if name in ("scheduler", "worker") else "client"
    assert targets == {"ca.pem", f"{role}.pem", f"{role}-key.pem"}
    assert {secret["source"] for secret in service["secrets"]} <= set(compose["secrets"])
    assert "./tls.yaml:/etc/dask/tls.yaml:ro" in service["volumes"]
    assert not any("tcp://" in word for word in service["command"])


def test_workers_come_back_whatever_they_return(compose):
    """A worker that lost its scheduler ends with exit code 0."""
    assert compose["services"]["worker"]["restart"] == "always"
    assert compose["services"]["drivers"]["restart"] == "always"


def test_the_nightly_job_is_repeated_for_one_exit_code_only(compose):
    service = compose["services"]["nightly"]
    assert service["command"][0] == "kme-retry"
    assert service["environment"]["KME_TLS"] == "/etc/kme-dist/tls"
    assert service["restart"] == "no", "the engine would repeat every failure"


def test_it_ends_in_a_smoke_command(compose):
    service = compose["services"]["smoke"]
    assert service["command"][:2] == ["kme-dist", "smoke"]
    assert service["depends_on"]["worker"] == {"condition": "service_healthy"}


def test_mounted_files_exist(compose):
    for service in ours(compose).values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).is_file()


# --- the commands of the file, without an engine ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_commands_make_a_cluster_that_works(compose, tmp_path):
    """Scheduler, worker, drivers and smoke as the file starts them, each with its files; another store stands in."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("cryptography")
    from kme_dist.ops.certs import make_certificates

    ports = {name: free_port() for name in ("8786", "8787", "8788", "9000")}
    make_certificates(tmp_path / "certs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=ports["9000"], verbose=False)
    server.start()
    started = []

    def start(name):
        service = compose["services"][name]
        home = tmp_path / name
        (home / "tls").mkdir(parents=True)
        for secret in service["secrets"]:
            source = Path(compose["secrets"][secret["source"]]["file"]).name
            shutil.copy(tmp_path / "certs" / source, home / "tls" / Path(secret["target"]).name)
        (home / "dask").mkdir()
        for settings in ("dask.yaml", "tls.yaml"):
            text = (DEPLOY / settings).read_text().replace("/etc/kme-dist/tls", str(home / "tls"))
            (home / "dask" / settings).write_text(text)
        environment = {key: value for key, value in service["environment"].items() if "SECRET" not in key}
        environment |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['9000']}",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "KME_ROOT": str(tmp_path),
            "KME_TLS": str(home / "tls"),
            "DASK_CONFIG": str(home / "dask"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
        }
        words = [
            word.replace("//scheduler:8786", f"//127.0.0.1:{ports['8786']}").replace(":8787", f":{ports['8787']}")
            for word in service["command"]
        ]
        words = [f":{ports['8788']}" if word == ":8788" else word for word in words]
        words = [str(ports["8786"]) if word == "8786" else word for word in words]
        with (home / "log").open("w") as log:
            process = subprocess.Popen(words, env=environment, cwd=home, stdout=log, stderr=subprocess.STDOUT)
        started.append(process)
        return process

    try:
        request = urllib.request.Request(f"http://127.0.0.1:{ports['9000']}/kme", method="PUT")
        with urllib.request.urlopen(request):
            start("scheduler")
        wait_until_healthy(ports["8787"])
        start("worker")
        start("drivers")
        wait_until_healthy(ports["8788"])
        done = start("smoke")
        assert done.wait(timeout=300) == 0, (tmp_path / "smoke" / "log").read_text()
        assert "passed: 1 worker," in (tmp_path / "smoke" / "log").read_text()
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['8787']}/kme", timeout=30) as page:
            assert page.status == 200
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.wait(timeout=60)
        server.stop()


def wait_until_healthy(port):
    """As the health checks of the file ask."""
    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"nothing answers on port {port}")
