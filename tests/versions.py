"""The tests under other versions: of the dependencies, and of Python.

    python tests/versions.py oldest [--full]                  the floors of pyproject.toml (constraints-oldest.txt)
    python tests/versions.py newest [--full]                  whatever pip finds, without constraints
    python tests/versions.py pythons [--full] python3.12 ...  other interpreters, with the newest dependencies

Each combination has an environment of its own in a temporary folder. By default the tests that touch what differs
between versions are run: arrays, solvers, Zarr, Dask, scikit-learn's checks, the command line (--full: all). With the
oldest versions, warnings of the libraries about their own deprecations are no errors; everything else is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]  # resolves in seconds what takes pip minutes
OLDEST = ROOT / "constraints-oldest.txt"
WATCHED = ("numpy", "scipy", "scikit-learn", "dask", "distributed", "zarr", "pyarrow", "pydantic", "typer", "bokeh")
# Files of tests that meet the libraries where they change.
SELECTED = (
    "tests/core/test_embedding.py", "tests/core/test_objective.py", "tests/core/test_sums.py", "tests/core/test_cg.py",
    "tests/core/test_kernels.py", "tests/data/test_dataset.py", "tests/data/test_store.py", "tests/data/test_ingest.py",
    "tests/data/test_cluster.py", "tests/run/test_executors.py", "tests/run/test_fit.py", "tests/run/test_predict.py",
    "tests/models/test_scikit_learn.py", "tests/models/test_estimators.py", "tests/models/test_regressor.py",
    "tests/models/test_tables.py", "tests/models/test_sparse_rows.py", "tests/config", "tests/cli/test_cli.py",
    "tests/report", "tests/ops/test_clusters.py", "tests/ops/test_dashboard.py", "tests/pipelines/test_pipelines.py",
    "tests/test_public_names.py", "tests/test_backend.py",
)  # fmt: skip


def try_versions(name: str, python: str, constraints: Path | None, full: bool) -> bool:
    """Install and test in a new environment; True if all tests passed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run([*UV, "venv", "--quiet", "--python", python, folder / "venv"], check=True)
        inside = folder / "venv" / "bin" / "python"
        pip = [*UV, "pip", "install", "--quiet", "--python", inside]
        wanted = [*pip, *(["--constraint", constraints] if constraints else []), "--editable", f"{ROOT}[test]"]
        installed = subprocess.run(wanted, check=False)
        if installed.returncode:
            print(f"{name}: FAILED, the dependencies cannot be installed together", flush=True)
            return False
        freeze = [*UV, "pip", "freeze", "--quiet", "--python", inside]
        listed = subprocess.run(freeze, check=True, text=True, stdout=subprocess.PIPE).stdout
        versions = dict(line.split("==") for line in listed.splitlines() if "==" in line)
        shown = ", ".join(f"{package} {versions.get(package, '?')}" for package in WATCHED)
        print(f"{name}: {shown}", flush=True)
        tests = [] if full else list(SELECTED)
        command = [
            inside,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-n",
            "2",
            "--dist",
            "loadfile",
            *tests,
        ]
        if constraints:
            command += ["-W", "default::DeprecationWarning", "-W", "default::FutureWarning"]
        tested = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    words = "passed" if tested.returncode == 0 else "FAILED"
    print(f"{name}: {words} after {time.monotonic() - start:.0f} s", flush=True)
    return tested.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["oldest", "newest", "pythons"])
    parser.add_argument("--full", action="store_true", help="all tests")
    parser.add_argument("--python", default=sys.executable, help="of oldest and newest")
    parser.add_argument("pythons", nargs="*", help="interpreters to try")
    given = parser.parse_args()
    if given.which == "oldest":
        return int(not try_versions("oldest versions", given.python, OLDEST, given.full))
    if given.which == "newest":
        return int(not try_versions("newest versions", given.python, None, given.full))
    passed = True
    for python in given.pythons:
        if shutil.which(python) is None:
            print(f"{python}: not installed here, not tested", flush=True)
            passed = False
            continue
        passed &= try_versions(python, python, None, given.full)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
