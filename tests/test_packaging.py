"""What is built and what lies in deploy/ matches the tree and the tools."""

from __future__ import annotations

import tomllib
from pathlib import Path

import dask
import yaml

ROOT = Path(__file__).parents[1]


def test_every_package_of_the_tree_goes_into_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inside = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "kme_dist").rglob("__init__.py")}
    assert set(listed) == inside | {"kme_dist.pipelines"}


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
