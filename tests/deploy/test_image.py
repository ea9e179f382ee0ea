"""The image: one for every role, several stages, no root; where a builder is installed it is really built and run."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import yaml
from deploy_tools import DEPLOY, HOST_FILES, ROOT, call, packaged_folders, tool

DOCKERFILE = DEPLOY / "Dockerfile"


def stages():
    """The stages of the Dockerfile by name: what each starts from, and its instructions on one line each."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()))
    found, current = {}, None
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            current = match.group(2)
            found[current] = {"from": match.group(1), "lines": []}
        elif current is not None:
            found[current]["lines"].append(line)
    return found


def lines_of(name):
    """Everything that has happened in a stage, those it builds on included."""
    stage = stages()[name]
    earlier = lines_of(stage["from"]) if stage["from"] in stages() else []
    return earlier + stage["lines"]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_product_runs_as_nobody_and_passes_signals_on(name):
    lines = lines_of(name)
    (user,) = [line for line in lines if line.startswith("USER ")]
    assert user == "USER 10001:10001"
    assert 'ENTRYPOINT ["tini", "--"]' in lines
    assert not any(re.search(r"\b(curl|wget|chmod 777|sudo)\b", line) for line in lines)
    assert not any(line.startswith(("RUN", "ADD")) for line in lines[lines.index(user) :]), "root's work is done before"


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_tools_that_build_stay_behind(name):
    lines = " ".join(lines_of(name))
    assert "pip install" not in lines
    assert f"COPY --from=install-{name} /opt/kme-dist /opt/kme-dist" in lines


def test_versions_are_those_of_the_tests():
    for name in ("install-cpu", "install-cuda"):
        (line,) = [line for line in lines_of(name) if "pip install" in line]
        assert "--constraint constraints.txt" in line


def test_the_base_is_the_reader_s_choice_and_the_same_in_all_stages():
    assert {stage["from"] for stage in stages().values()} - set(stages()) == {"${BASE}"}
    assert list(stages())[-1] == "cpu", "what is built when no target is named"


def test_everything_that_is_copied_is_there_and_not_ignored():
    allowed = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().split() if line.startswith("!")}
    copied = set()
    for stage in stages().values():
        for line in stage["lines"]:
            if line.startswith("COPY ") and "--from" not in line:
                copied |= set(line.split()[1:-1])
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)
    assert packaged_folders() <= copied


def test_settings_of_dask_lie_where_dask_looks():
    (line,) = [line for line in lines_of("cpu") if "dask.yaml" in line]
    assert line == "COPY deploy/dask.yaml /etc/dask/kme-dist.yaml"
    assert yaml.safe_load((DEPLOY / "dask.yaml").read_text())["distributed"]


def test_hadolint_finds_nothing(tmp_path):
    hadolint = tool("hadolint")
    done = call(hadolint, DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(
        DOCKERFILE.read_text().replace("--no-install-recommends ", "").replace("WORKDIR /data", "RUN cd x")
    )
    found = call(hadolint, "--format", "json", broken)
    assert found.returncode != 0
    assert {"DL3003", "DL3015"} <= {finding["code"] for finding in json.loads(found.stdout)}


@pytest.mark.slow
def test_checkov_finds_nothing(tmp_path):
    checkov = tool("checkov")

    def failed(folder):
        done = call(
            checkov, "--skip-download", "--compact", "--output", "json", "--framework", "dockerfile", "-d", folder
        )
        report = json.loads(done.stdout)
        assert report["summary"]["passed"] > 0
        return {check["check_id"] for check in report["results"]["failed_checks"]}

    shutil.copy(DOCKERFILE, tmp_path / "Dockerfile")
    assert failed(tmp_path) <= {"CKV_DOCKER_7"}  # takes the name of a stage for an image without a tag
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.read_text().replace("USER 10001:10001", ""))
    assert "CKV_DOCKER_3" in failed(tmp_path)


# --- built for real ---------------------------------------------------------------------------------

INSIDE = ["--isolation", "chroot", "--network", "host"]


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """A function that runs buildah with a store of its own, and a base image without a registry."""
    buildah, mmdebstrap = tool("buildah"), tool("mmdebstrap")
    if os.geteuid() != 0:
        pytest.skip("building in chroot isolation needs root")
    home = tmp_path_factory.mktemp("buildah")

    def run(*words, **options):
        storage = ["--root", home / "root", "--runroot", home / "run", "--storage-driver", "vfs"]
        return call(buildah, *storage, *words, **options)

    archive = home / "base.tar"
    packages = "--include=python3,python3-venv,ca-certificates"
    done = call(mmdebstrap, "--variant=minbase", packages, "bookworm", archive, timeout=900)
    if done.returncode != 0:
        pytest.skip(f"no base image could be made: {done.stderr[-300:]}")
    (home / "Base").write_text("FROM scratch\nADD base.tar /\n")
    done = run("bud", *INSIDE, "--tag", "localhost/base", "--file", home / "Base", home)
    assert done.returncode == 0, done.stderr
    archive.unlink()
    yield run
    run("rm", "--all")
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_builds_and_its_entry_point_runs_as_nobody(builder):
    passed = [f"--build-arg={name}" for name in BUILD_ENVIRONMENT if name in os.environ]
    mounts = [f"--volume={path}:{path}:ro" for path in HOST_FILES if os.path.exists(path)]
    done = builder(
        *("bud", *INSIDE, *passed, *mounts, "--build-arg=BASE=localhost/base", "--target=cpu"),
        *("--tag", "kme-dist", "--file", DOCKERFILE, ROOT),
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    config = json.loads(builder("inspect", "--type", "image", "kme-dist").stdout)["OCIv1"]["config"]
    assert config["User"] == "10001:10001"
    container = builder("from", "kme-dist").stdout.strip()

    def inside(*words):
        return builder("run", "--isolation", "chroot", "--user", "10001:10001", container, "--", *words, timeout=300)

    assert inside("id", "-u").stdout.strip() == "10001"
    assert inside("sh", "-c", "command -v pip gcc git").stdout.strip() in ("", "/opt/kme-dist/bin/pip")
    done = inside("tini", "--", "kme-dist", "smoke", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["status"] == "succeeded"
    code = inside("env", "KME_ATTEMPTS=2", "KME_RETRY_WAIT=0", "kme-retry", "sh", "-c", "exit 75").returncode
    assert code == 75
    done = inside("python3", "-c", "import dask; print(dask.config.get('distributed.scheduler.allowed-failures'))")
    wanted = yaml.safe_load((DEPLOY / "dask.yaml").read_text())["distributed"]["scheduler"]["allowed-failures"]
    assert done.stdout.strip() == str(wanted)


# How this host reaches the package index; a builder sees none of it unless told.
BUILD_ENVIRONMENT = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")
