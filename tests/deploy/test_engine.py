"""compose on a real engine: the commands of the guide start a cluster, test it, run a job on it, and take it down.

The engine is one of its own (its socket, images and containers are in a temporary folder). There is no registry here,
so the base image is a Debian root, and an S3 server of the tests stands in for the object store's images.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from deploy_tools import DEPLOY, HOST_FILES, ROOT, TOOLS, call, debian_archive, tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
USER = 1234  # as KME_UID: neither root nor the user of the image
COMPOSE_FILE = DEPLOY / "compose.yaml"

BASE = """
FROM {root}
COPY files /
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv
"""
STORE = """
FROM kme-dist:local
USER 0:0
COPY constraints.txt /
RUN /opt/kme-dist/bin/python -m pip install --quiet --constraint /constraints.txt 'moto[server]'
COPY server mc /usr/local/bin/
WORKDIR /
ENTRYPOINT []
"""
SERVER = "#!/bin/sh\nexec /opt/kme-dist/bin/moto_server --host 0.0.0.0 --port 9000\n"
CLIENT = """#!/opt/kme-dist/bin/python
import sys
from urllib.request import Request, urlopen
match sys.argv[1:]:
    case ["ready", "local"]:
        urlopen("http://127.0.0.1:9000/", timeout=5)
    case ["mb", "--ignore-existing", place]:
        urlopen(Request(f"http://store:9000/{place.removeprefix('store/')}", method="PUT"), timeout=5)
    case ["alias", "set", "store", "http://store:9000", "kme-dist", secret]:
        assert secret
    case words:
        sys.exit(f"the stand-in does not know {words}")
"""


class Engine:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, "DOCKER_HOST": f"unix://{home}/socket", "DOCKER_BUILDKIT": "1"}

    def docker(self, *words, **options):
        return call(docker_client(), *words, env=self.environment, **options)

    def build(self, tag, dockerfile, context, *words):
        done = self.docker("build", "--network=host", "--tag", tag, "--file", dockerfile, *words, context)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    def compose(self, *words, text=None, **options):
        """On a copy of the file whose published ports are chosen by the system."""
        copy = self.home / "compose.yaml"
        text = re.sub(r'"127\.0\.0\.1:\d+:(\d+)"', r'"127.0.0.1::\1"', text or COMPOSE_FILE.read_text())
        copy.write_text(text.replace("- ./", f"- {DEPLOY}/"))
        return call(compose_program(), "--file", copy, *words, env=self.environment, **options)


def docker_client():
    """Debian's own has BuildKit, which leaves out stages that are not asked for; others need a plugin for it."""
    return "/usr/bin/docker" if os.access("/usr/bin/docker", os.X_OK) else tool("docker")


def compose_program():
    path = TOOLS / "bin" / "docker-compose"
    if not path.exists():
        pytest.skip("docker-compose 2 is not installed; `tests/deploy/install_tools --system` does it")
    return path


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A container engine with the images that the file names."""
    dockerd = tool("dockerd")
    compose_program()
    if os.geteuid() != 0:
        pytest.skip("a container engine needs root")
    archive = debian_archive()
    home = Path(tmp_path_factory.mktemp("engine"))
    one = Engine(home)
    log = (home / "log").open("w")
    folders = ["--data-root", home / "data", "--exec-root", home / "exec", "--pidfile", home / "pid"]
    daemon = subprocess.Popen(
        [dockerd, "--host", one.environment["DOCKER_HOST"], *folders], stdout=log, stderr=subprocess.STDOUT
    )
    try:
        for _ in range(120):
            if one.docker("version").returncode == 0:
                break
            if daemon.poll() is not None:
                pytest.skip(f"no container engine can run here: {(home / 'log').read_text()[-300:]}")
            time.sleep(0.5)
        make_images(one, archive)
        make_certificates(one)
        yield one
        one.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)
        log.close()
        shutil.rmtree(home, ignore_errors=True)


def make_images(one, archive):
    base = one.home / "base"
    for path in map(Path, HOST_FILES):
        if path.exists():
            (base / "files").joinpath(*path.parts[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, (base / "files").joinpath(*path.parts[1:]))
    done = one.docker("import", archive, "debian-root")
    assert done.returncode == 0, done.stderr
    (base / "Dockerfile").write_text(BASE.format(root="debian-root"))
    one.build("kme-base", base / "Dockerfile", base)
    one.build("kme-dist:local", DEPLOY / "Dockerfile", ROOT, "--build-arg", "BASE=kme-base")
    store = one.home / "store"
    store.mkdir()
    (store / "Dockerfile").write_text(STORE)
    shutil.copy(ROOT / "constraints.txt", store)
    for name, text in (("server", SERVER), ("mc", CLIENT)):
        (store / name).write_text(text)
        (store / name).chmod(0o755)
    one.build("kme-store", store / "Dockerfile", store)


def make_certificates(one):
    from kme_dist.ops.certs import make_certificates as make

    certificates = one.home / "certs"
    make(certificates)
    for path in (certificates, *certificates.iterdir()):
        os.chown(path, USER, USER)
    one.environment |= {
        "KME_CERTS": str(certificates),
        "KME_STORE_SECRET": "of-the-test",
        "KME_UID": str(USER),
        "KME_GID": str(USER),
        "KME_STORE_IMAGE": "kme-store",
        "KME_STORE_CLIENT_IMAGE": "kme-store",
    }


def test_compose_understands_the_file(tmp_path):
    """Needs no engine."""
    environment = {**os.environ, "KME_CERTS": str(tmp_path), "KME_STORE_SECRET": "x"}
    check = [compose_program(), "--file", COMPOSE_FILE]
    done = call(*check, "config", "--services", env=environment)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"scheduler", "worker", "drivers", "store"}, (
        "what `up` starts: nothing that ends"
    )
    del environment["KME_STORE_SECRET"]
    done = call(*check, "config", env=environment)
    assert done.returncode != 0
    assert "choose a secret for the object store" in done.stderr


def test_the_commands_of_the_guide_make_a_cluster_that_works(engine):
    done = engine.compose("up", "--detach", "--wait", timeout=900)
    assert done.returncode == 0, done.stderr + engine.compose("logs", "--tail=30").stdout
    states = engine.compose("ps", "--format", "{{.Service}} {{.State}}").stdout.splitlines()
    assert set(states) == {f"{name} running" for name in ("scheduler", "worker", "drivers", "store")}
    done = engine.compose("run", "--rm", "smoke", timeout=600)
    assert done.returncode == 0, done.stderr + engine.compose("logs", "--tail=30").stdout
    assert "passed: " in done.stdout


def test_a_job_runs_on_it(engine):
    """The disk is shared, and writable for whoever KME_UID is."""
    from sklearn.datasets import load_wine

    rows = load_wine(as_frame=True).frame.to_csv(index=False)
    script = """
set -e
cd /data
cat > wine.csv
kme-dist ingest wine.csv table.zarr --label target --shuffle 0 --quiet
printf 'data: {source: table.zarr}\\nlearn: {steps: 5, batch_size: 60}\\noutput: {folder: runs/model}\\n' > model.yaml
kme-dist submit model.yaml --pipeline learn --scheduler tls://scheduler:8786 --id first
kme-dist jobs wait first --scheduler tls://scheduler:8786
"""
    done = engine.compose("run", "--rm", "--no-TTY", "smoke", "sh", "-c", script, input=rows, timeout=600)
    assert done.returncode == 0, done.stderr + engine.compose("logs", "--tail=60").stdout


def test_a_service_that_ends_would_make_the_guide_fail(engine, tmp_path):
    """Why the bucket has a profile: `up --wait` takes the end of any service for a failure."""
    engine.compose("down", "--timeout", "5")
    text = COMPOSE_FILE.read_text()
    assert text.count("    profiles: [smoke, nightly]\n") == 1
    done = engine.compose(
        *("up", "--detach", "--wait"), text=text.replace("    profiles: [smoke, nightly]\n", ""), timeout=900
    )
    assert done.returncode != 0
    assert "bucket" in done.stderr
