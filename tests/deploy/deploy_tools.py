"""What the tests of deploy/ share: where the validators are, and what kustomize would make of the overlays.

Small validators come with the extra `test`. The others are looked for in the folder that KME_DEPLOY_TOOLS names
(.venv/deploy-tools when absent; `tests/deploy/install_tools` fills it) and on the PATH. What is nowhere is skipped,
with the reason.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import jsonpatch
import pytest
import yaml

from kme_dist import errors

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("cpu", "gpu", "job-cpu", "job-gpu")
TOOLS = Path(os.environ.get("KME_DEPLOY_TOOLS", ROOT / ".venv" / "deploy-tools"))

# Exit codes after which the same command would fail again, and those after which it may succeed.
OWN_ERRORS = [errors.ConfigError, errors.DataError, errors.NumericalError, errors.CorruptError, errors.RetryError]
TRY_AGAIN = errors.RetryError.exit_code
FINAL = sorted({errors.KMEError.exit_code} | {kind.exit_code for kind in OWN_ERRORS} - {TRY_AGAIN})


def tool(name: str) -> str:
    """The path of a validator, or a skipped test."""
    beside = Path(sys.executable).with_name(name)
    for path in (beside, TOOLS / "bin" / name):
        if os.access(path, os.X_OK):
            return str(path)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `tests/deploy/install_tools` does it, or a package of the system")
    return found


def package_folder(name: str) -> Path:
    """The folder of an installed package whose data files are wanted, not its code; or a skipped test."""
    folders = [Path(entry) for entry in sys.path if entry] + sorted(TOOLS.glob("lib/python3*/site-packages"))
    for folder in folders:
        if (folder / name).is_dir():
            return folder / name
    pytest.skip(f"the package {name} is not installed; `tests/deploy/install_tools` does it")


def packaged_folders() -> set[str]:
    """The folders of the repository whose packages and data an installation is built from."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    given = settings["package-dir"]
    owners = {name: max((own for own in given if f"{name}.".startswith(f"{own}.")), key=len, default=None)
              for name in settings["packages"]}  # fmt: skip
    return {name.partition(".")[0] if own is None else given[own] for name, own in owners.items()}


def call(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    """Run a command and catch what it says."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)


# How this host reaches the package index; a machine that the tests make sees none of it unless told.
HOST_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


def debian_archive() -> Path:
    """A fresh Debian with systemd and Python as an archive, made once; or a skipped test."""
    archive = TOOLS / "debian-root.tar"
    if not archive.exists():
        debootstrap = tool("debootstrap")
        with tempfile.TemporaryDirectory() as folder:
            root, packages = Path(folder) / "root", "systemd,systemd-sysv,dbus,ca-certificates,python3"
            done = call(debootstrap, "--variant=minbase", f"--include={packages}", "bookworm", root, timeout=900)
            if done.returncode != 0:
                pytest.skip(f"no Debian could be installed into a folder: {done.stdout[-300:]}")
            shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
            archive.parent.mkdir(exist_ok=True, parents=True)
            part = archive.with_suffix(".part")
            assert call("tar", "--create", "--file", part, "--directory", root, ".").returncode == 0
            part.rename(archive)
    return archive


def documents(path: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def overlay(name: str) -> list[dict]:
    """The resources of an overlay, without kubectl: the few features of kustomize that the files here use."""
    return copy.deepcopy(_build(KUBERNETES / "overlays" / name))


@functools.cache
def _build(folder: Path) -> list[dict]:
    recipe = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    known = {
        "apiVersion",
        "kind",
        "namespace",
        "resources",
        "configMapGenerator",
        "generatorOptions",
        "images",
        "patches",
    }
    assert set(recipe) <= known, f"{folder}: this stand-in for kustomize knows {sorted(known)}"
    resources = []
    for entry in recipe["resources"]:
        path = folder / entry
        resources += copy.deepcopy(_build(path.resolve())) if path.is_dir() else documents(path)
    for generator in recipe.get("configMapGenerator", ()):
        files = {Path(file).name: (folder / file).read_text(encoding="utf-8") for file in generator["files"]}
        resources.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": files}
        )
    for patch in recipe.get("patches", ()):
        steps = yaml.safe_load((folder / patch["path"]).read_text(encoding="utf-8"))
        wanted = patch["target"]
        chosen = [r for r in resources if (r["kind"], r["metadata"]["name"]) == (wanted["kind"], wanted["name"])]
        assert chosen, f"{folder}: no {wanted['kind']} {wanted['name']} to patch"
        for resource in chosen:
            jsonpatch.apply_patch(resource, steps, in_place=True)
    for image in recipe.get("images", ()):
        for container in all_containers(resources):
            if container["image"].split(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    if "namespace" in recipe:
        for resource in resources:
            if resource["kind"] != "Namespace":
                resource["metadata"]["namespace"] = recipe["namespace"]
    return resources


def all_containers(value) -> list[dict]:
    """Every container of every pod, at any depth."""
    if isinstance(value, list):
        return [container for item in value for container in all_containers(item)]
    if not isinstance(value, dict):
        return []
    found = list(value["containers"]) if isinstance(value.get("containers"), list) else []
    return found + [c for key, item in value.items() if key != "containers" for c in all_containers(item)]


def all_pods(value) -> list[dict]:
    """Every pod specification, at any depth."""
    if isinstance(value, list):
        return [pod for item in value for pod in all_pods(item)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("containers"), list):
        return [value]
    return [pod for item in value.values() for pod in all_pods(item)]
