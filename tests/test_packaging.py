"""What is built and what lies in deploy/ matches the tree and the tools."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import dask
import licences
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import kme_dist

ROOT = Path(__file__).parents[1]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def test_every_package_of_the_tree_goes_into_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inside = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "kme_dist").rglob("__init__.py")}
    pipelines = {
        ".".join(("kme_dist", *p.parent.relative_to(ROOT).parts)) for p in ROOT.glob("pipelines/**/__init__.py")
    }
    assert set(listed) == inside | pipelines | {"kme_dist.pipelines.reproduce.published_figures"}


def test_every_other_file_of_a_package_goes_into_the_wheel():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = {
        path for name, patterns in data.items() for p in patterns for path in ROOT.joinpath(*name.split(".")).glob(p)
    }
    found = {path for path in (ROOT / "kme_dist").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert found == listed
    assert ROOT / "kme_dist" / "tiles.cu" in found


def keys(tree, path=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from keys(value, (*path, name))
        else:
            yield ".".join((*path, name))


def test_every_setting_in_deploy_is_one_that_dask_knows():
    import distributed  # noqa: F401  (registers its defaults)

    known = {}
    for defaults in dask.config.defaults:
        known = dask.config.merge(known, defaults)
    unknown = object()
    for key in keys(yaml.safe_load((ROOT / "deploy" / "dask.yaml").read_text())):
        named = key.partition("-environ.")[0]  # names of environment variables are free
        assert dask.config.get(named + "-environ" * (named != key), unknown, config=known) is not unknown, key


def test_the_version_is_in_one_place_and_repeated_correctly():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kme_dist.__version__"}
    assert metadata.version("kme-dist") == kme_dist.__version__
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == kme_dist.__version__
    assert re.search(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text()).group(1) == kme_dist.__version__


def test_the_citation_follows_its_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format"]
    done = subprocess.run([*command, "CITATION.cff"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def floors(requirements):
    """(name, lowest version allowed) of requirements."""
    found = [Requirement(text) for text in requirements]
    return {r.name.lower(): next(s.version for s in r.specifier if s.operator == ">=") for r in found}


def test_the_oldest_versions_tested_are_the_oldest_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if line[:1] not in ("", "#")]
    tested = {r.name.lower(): Version(next(iter(r.specifier)).version) for r in map(Requirement, lines)}
    allowed = {name: Version(version) for name, version in floors(project["dependencies"]).items()}
    assert {name: tested.get(name) for name in allowed} == allowed


def test_every_tool_of_documentation_and_release_is_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {r.name.lower() for r in map(Requirement, filter(lambda line: "==" in line, CONSTRAINTS.splitlines()))}
    for extra in ("docs", "release", "test"):
        missing = {Requirement(text).name.lower() for text in extras[extra]} - pinned
        assert {name for name in missing if name.replace("-", "_") not in pinned} == set()


@pytest.mark.parametrize(
    ("licence", "accepted"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND MIT AND Zlib", True),
        ("GPL-3.0-or-later", False),
        ("MIT AND AGPL-3.0", False),
        ("GPL-2.0 OR Apache-2.0", True),
        ("GPL-3.0-with-GCC-exception", True),
        ("UNKNOWN", False),
        ("Apache Software License; BSD License", True),
    ],
)
def test_licences_with_conditions_on_our_code_are_refused(licence, accepted):
    assert (licences.refusal(licence) is None) == accepted
