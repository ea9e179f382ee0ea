"""Settings of a production cluster: tidy YAML, keys that Dask knows, and a real scheduler that behaves as they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from deploy_tools import DEPLOY, call, overlay, tool
from ports import free_port

RULES = """
extends: default
rules:
  line-length: {max: 120}
  document-start: disable
  comments: {min-spaces-from-content: 1}
  comments-indentation: disable
  brackets: {max-spaces-inside: 0}
"""
FILES = sorted(
    path
    for path in DEPLOY.rglob("*.y*ml")
    if not ({"prometheus", "grafana", "templates"} & set(path.parts) or path.is_symlink())
)


def test_yamllint_finds_nothing(tmp_path):
    yamllint = [tool("yamllint"), "--strict", "--config-data", RULES]
    done = call(*yamllint, *FILES)
    assert (done.returncode, done.stdout) == (0, "")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: 1\na: 2\n")
    assert "duplication of key" in call(*yamllint, broken).stdout


@pytest.mark.parametrize("name", ["dask.yaml", "tls.yaml", "helm/kme-dist/files/scheduler.yaml"])
def test_dask_knows_every_key(name):
    import distributed

    defaults = yaml.safe_load((Path(distributed.__file__).parent / "distributed.yaml").read_text())
    assert unknown_keys(yaml.safe_load((DEPLOY / name).read_text()), defaults) == []
    assert unknown_keys({"distributed": {"comm": {"retries": 5}}}, defaults) == ["distributed.comm.retries"]


def unknown_keys(ours, known, path=""):
    if not isinstance(ours, dict) or not isinstance(known, dict) or path.endswith("-environ."):
        return []  # names of environment variables are free
    found = [f"{path}{key}" for key in ours if key not in known]
    for key in set(ours) & set(known):
        found += unknown_keys(ours[key], known[key], f"{path}{key}.")
    return found


def test_the_scheduler_of_kubernetes_keeps_the_routes_that_dask_has_by_default():
    import distributed

    defaults = yaml.safe_load((Path(distributed.__file__).parent / "distributed.yaml").read_text())
    ours = yaml.safe_load((DEPLOY / "helm/kme-dist/files/scheduler.yaml").read_text())
    usual = defaults["distributed"]["scheduler"]["http"]["routes"]
    added = set(ours["distributed"]["scheduler"]["http"]["routes"]) - set(usual)
    assert set(usual) <= set(ours["distributed"]["scheduler"]["http"]["routes"])
    assert added == {"distributed.http.scheduler.api"}


@pytest.fixture(scope="module")
def kubernetes_scheduler(tmp_path_factory):
    """A scheduler with the settings of the Kubernetes base, certificates of its own: (port, port of pages, home)."""
    pytest.importorskip("cryptography")
    from kme_dist.ops.certs import make_certificates

    home = tmp_path_factory.mktemp("scheduler")
    make_certificates(home / "tls")
    settings = home / "dask"
    settings.mkdir()
    (map_,) = [r for r in overlay("cpu") if (r["kind"], r["metadata"]["name"]) == ("ConfigMap", "kme-dist-dask")]
    for name, text in map_["data"].items():
        (settings / name).write_text(text.replace("/etc/kme-dist/tls", str(home / "tls")))
    ports = [free_port(), free_port()]
    command = ["scheduler", "--protocol", "tls", "--host", "127.0.0.1", "--port", str(ports[0])]
    command += ["--dashboard-address", f"127.0.0.1:{ports[1]}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", *command],
        env={**os.environ, "DASK_CONFIG": str(settings)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            if answer(ports[1], "/health")[0] == 200:
                break
            assert process.poll() is None, "the scheduler ended"
            time.sleep(0.1)
        yield ports[0], ports[1], home
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def answer(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as page:
            return page.status, page.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except OSError:
        return None, b""


def test_the_autoscaler_can_ask_a_scheduler_that_speaks_tls(kubernetes_scheduler):
    """The operator has no certificate; it asks the HTTP port, on a route that Dask leaves out by default."""
    status, body = answer(kubernetes_scheduler[1], "/api/v1/adaptive_target")
    assert status == 200
    assert json.loads(body)["workers"] == 0


def test_probes_and_prometheus_find_their_pages(kubernetes_scheduler):
    for path in ("/health", "/metrics"):
        assert answer(kubernetes_scheduler[1], path)[0] == 200


def test_the_certificate_of_clients_opens_the_door_and_nothing_else_does(kubernetes_scheduler):
    port, _, home = kubernetes_scheduler
    security = {name: str(home / "tls" / file) for name, file in TLS_FILES.items()}
    script = f"""
from distributed import Client, Security
for scheme, keys in (("tcp", {{}}), ("tls", {{}}), ("tls", {security})):
    try:
        with Client(f"{{scheme}}://127.0.0.1:{port}", security=Security(**keys) if keys else None, timeout=3) as client:
            print("in", len(client.scheduler_info()["workers"]))
    except (OSError, TypeError, RuntimeError, ValueError):
        print("out")
"""
    done = call(sys.executable, "-c", script)
    assert done.stdout.splitlines() == ["out", "out", "in 0"], done.stderr


TLS_FILES = {"tls_ca_file": "ca.pem", "tls_client_cert": "client.pem", "tls_client_key": "client-key.pem"}
