"""Which small mistakes would the tests not notice? `make mutants`; `COUNT=50`, `SEED=1`, `MODULES="data/leases.py"`.

The package is changed in one place (`tests/mutations.py`) and the tests that reach this place are run: the mutant is
killed if one fails, crashes or hangs, and passes without the change right after: a test that fails there as well says
nothing of the mutant, which then is unsettled. It survives otherwise, and is either a promise without a test, or a
change without an effect, which `tests/mutants_survivors.toml` explains. The command ends with 1 if less than 95 % are
killed, a survivor is not explained, or a mutant is unsettled.

Everything happens in a private copy of the repository in a temporary folder; the work tree is only read, so a kill at
any moment is harmless. Finished mutants are in build/mutants.jsonl, and are not run again; survivors are, once a test
file that reaches them has changed. Which tests reach what is recorded once for every test file
(build/mutants-reach.json), from a copy with a mark in every block of statements; processes that tests start are
included. A mutant runs in a fork of a process that has imported the libraries, but nothing of kme-dist.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))
from mutations import Mutation, marked, mutations, sampled  # noqa: E402

REQUIRED = 0.95
RESULTS, REACH = ROOT / "build" / "mutants.jsonl", ROOT / "build" / "mutants-reach.json"
SURVIVORS = HERE / "mutants_survivors.toml"
MODULES = [
    *sorted(
        path.relative_to(ROOT / "kme_dist").as_posix()
        for folder in ("core", "data")
        for path in (ROOT / "kme_dist" / folder).rglob("*.py")
    ),
    *(f"run/{name}.py" for name in ["checkpoints", "gathering", "predict", "streams"]),
    "models/outputs.py",
]
NOT_MUTATED = {"core/__init__.py", "data/__init__.py", "core/kernels/fused.py"}  # without code; for a GPU
FOLDERS = ("core", "data", "run", "models", "pipelines")  # of tests
NOT_USED = {
    "data/test_fuzzed_readers.py": "bounds the memory of its process",
    "data/test_shared_data.py": "needs the shared data sets",
    "run/test_same_bits_everywhere.py": "minutes",
}
# The test files of a module that is not mirrored by its name; they are run first.
MIRRORS = {
    "core/bayes.py": ["models/test_bayes.py"],
    "core/density.py": ["core/test_density.py", "models/test_density_matching.py"],
    "core/grid.py": ["core/test_tuning.py"],
    "core/independence.py": ["models/test_independence.py"],
    "core/maps.py": ["core/test_features.py", "core/test_spectral.py"],
    "core/mmd.py": ["models/test_mmd.py"],
    "core/nystrom.py": ["core/test_pivots.py", "core/test_sums.py"],
    "core/risk.py": ["core/test_objective.py", "core/test_weights.py"],
    "data/append.py": ["data/test_dataset.py"],
    "data/chunks.py": ["data/test_dataset.py", "data/test_store.py", "data/test_durability.py"],
    "data/columns.py": ["data/test_ingest.py", "data/test_csv.py"],
    "data/csv_reader.py": ["data/test_csv.py"],
    "data/encode.py": ["data/test_ingest.py", "data/test_validation.py"],
    "data/frames.py": ["data/test_validation.py", "data/test_ingest.py"],
    "data/ingest.py": ["data/test_ingest_pipeline.py"],
    "data/lazy.py": ["run/test_predict.py"],
    "data/matrix_readers.py": ["data/test_ingest.py"],
    "data/new_rows.py": ["run/test_predict.py"],
    "data/notation.py": ["data/test_csv.py"],
    "data/plan.py": ["data/test_batches.py"],
    "data/prefetch.py": ["data/test_batches.py"],
    "data/readers.py": ["data/test_ingest.py"],
    "data/reading.py": ["data/test_dataset.py"],
    "data/rows.py": ["data/test_batches.py"],
    "data/schema.py": ["data/test_ingest.py"],
    "data/seals.py": ["data/test_dataset.py"],
    "data/sparse.py": ["data/test_ingest.py"],
    "data/splits.py": ["data/test_ingest.py"],
    "data/survey.py": ["data/test_ingest.py"],
    "data/predictions.py": ["run/test_prediction_storage.py", "run/test_predict.py"],
    "data/receipts.py": ["run/test_prediction_storage.py", "run/test_predict.py"],
    "data/statistics.py": ["data/test_dataset.py", "data/test_ingest.py"],
    "data/writer.py": ["data/test_dataset.py", "data/test_ingest.py"],
    "models/outputs.py": ["run/test_predict.py", "run/test_skipped_rows.py"],
    "run/predict.py": ["run/test_predict.py", "run/test_prediction_storage.py", "run/test_skipped_rows.py"],
}
OPTIONS = [
    "-q",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:randomly",
    "-p",
    "no:random_order",
    "-p",
    "no:xdist",
]
PLAIN = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
MARKS = """
import os

_seen = set()
_folder, _main = os.environ.get("KME_MARKS"), int(os.environ.get("KME_MARKS_MAIN", "0"))


def reached(block):
    if block not in _seen:
        _seen.add(block)
        if _folder and os.getpid() != _main:
            with open(os.path.join(_folder, str(os.getpid())), "a") as file:
                file.write(block + "\\n")
"""


# --- a private copy --------------------------------------------------------------------------------


class Copy:
    """The files of the repository in a temporary folder, which its processes import instead of the work tree."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "kme_dist" / "pipelines").symlink_to("../pipelines")
        (folder / "kme_marks.py").write_text(MARKS)
        subprocess.run([sys.executable, "-m", "compileall", "-q", "kme_dist", "tests"], cwd=folder, check=False)

    def write(self, module: str, source: str) -> None:
        path = self.root / "kme_dist" / module
        path.write_text(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()  # it counts as current if a change keeps the size and the second

    def update_tests(self) -> None:
        """Tests that were written since."""
        for path in HERE.rglob("*.py"):
            target = self.root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)

    def run(self, call: Callable[[], int], limit: float, log: Path) -> int | None:
        """The exit code of `call` in a fork of this process, which has a session of its own; None after `limit`."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                sink = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.chdir(self.root)
                scratch = self.root / "tmp"
                scratch.mkdir(exist_ok=True)
                os.environ.update(PLAIN, PYTHONPATH=str(self.root), TMPDIR=str(scratch))
                tempfile.tempdir = None
                sys.path[:] = [str(self.root), *(entry for entry in sys.path if entry not in (str(HERE), str(ROOT)))]
                code = int(call())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                sys.stdout.flush()
                os._exit(code)
        until, found = time.monotonic() + limit, 0
        while not found and time.monotonic() < until:
            found, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0 if found else 0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the tests have left behind
        if not found:
            os.waitpid(child, 0)
            return None
        return os.waitstatus_to_exitcode(status)


LIBRARIES = [
    "numpy",
    "scipy.linalg",
    "scipy.sparse",
    "scipy.special",
    "scipy.optimize",
    "scipy.stats",
    "pandas",
    "zarr",
]
LIBRARIES += ["dask.array", "distributed", "pyarrow.parquet", "pyarrow.csv", "pydantic", "yaml", "mpmath"]
LIBRARIES += ["sklearn.base", "sklearn.datasets", "sklearn.model_selection", "autograd.numpy", "array_api_strict"]


def import_libraries() -> None:
    """What kme-dist and its tests import, without themselves: forks need not do it again."""
    for name in LIBRARIES:
        importlib.import_module(name)


# --- what tests reach ------------------------------------------------------------------------------


class Recorder:
    """A plugin of pytest: seconds and blocks of every test that passed. What a fixture of a module reaches belongs to
    every test that uses it."""

    def __init__(self, folder: Path, sink: Any) -> None:
        self.folder, self.sink, self.passed = folder, sink, set[str]()
        self.of_fixtures: dict[Any, set[str]] = {}

    def _taken(self) -> set[str]:
        import kme_marks  # type: ignore[import-not-found]

        found = set(kme_marks._seen)
        kme_marks._seen.clear()
        for path in self.folder.iterdir():
            found |= set(path.read_text().split("\n")) - {""}
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        import kme_marks

        if fixturedef.scope == "function":
            return (yield)
        outside = set(kme_marks._seen)
        kme_marks._seen.clear()
        try:
            return (yield)
        finally:
            self.of_fixtures[fixturedef] = set(kme_marks._seen)
            kme_marks._seen.update(outside)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        for path in self.folder.iterdir():
            path.unlink()
        self._taken()
        began = time.monotonic()
        try:
            return (yield)
        finally:
            blocks = self._taken()
            for known in item._fixtureinfo.name2fixturedefs.values():
                blocks |= self.of_fixtures.get(known[-1], set())
            if item.nodeid in self.passed:
                seconds = round(time.monotonic() - began, 3)
                self.sink.write(json.dumps([item.nodeid, {"seconds": seconds, "blocks": sorted(blocks)}]) + "\n")
                self.sink.flush()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        elif report.failed:
            self.passed.discard(report.nodeid)


def record(copy: Copy, names: Iterable[str]) -> dict[str, Any]:
    """The tests of every file with their seconds and blocks; files that have not changed since are not run again."""
    known: dict[str, Any] = {} if not REACH.exists() else json.loads(REACH.read_text())
    names = list(names)
    missing = [name for name in names if known.get(name, {}).get("digest") != _digest(HERE / name)]
    if missing:
        sources = {path.relative_to(copy.root / "kme_dist").as_posix() for path in copy.root.glob("kme_dist/*/**/*.py")}
        kept = {name: (copy.root / "kme_dist" / name).read_text() for name in sources & set(MODULES)}
        for name, source in kept.items():
            copy.write(name, marked(name, source))
        for number, name in enumerate(missing):
            began = time.monotonic()
            tests = _recorded(copy, name)
            known[name] = {"digest": _digest(HERE / name), "tests": tests}
            REACH.parent.mkdir(exist_ok=True)
            REACH.with_suffix(".partial").write_text(json.dumps(known))
            REACH.with_suffix(".partial").replace(REACH)
            took = time.monotonic() - began
            print(f"recorded {number + 1}/{len(missing)} tests/{name}: {len(tests)} tests, {took:.0f} s", flush=True)
        for name, source in kept.items():
            copy.write(name, source)
    return {name: known[name] for name in names}


def _recorded(copy: Copy, name: str) -> dict[str, Any]:
    marks, result = copy.root / "marks", copy.root / "reached.jsonl"
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir()
    result.unlink(missing_ok=True)

    def call() -> int:
        os.environ.update(KME_MARKS=str(marks), KME_MARKS_MAIN=str(os.getpid()))
        with result.open("w") as sink:
            return int(pytest.main([*OPTIONS, f"tests/{name}"], plugins=[Recorder(marks, sink)]))

    code = copy.run(call, 240, copy.root / "record.log")
    found = dict(map(json.loads, result.read_text().splitlines())) if result.exists() else {}
    if not found:
        raise SystemExit(f"tests/{name}, exit code {code}:\n{(copy.root / 'record.log').read_text()[-3000:]}")
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# --- one mutant ------------------------------------------------------------------------------------


def chosen_tests(mutation: Mutation, reach: dict[str, Any], seconds: float) -> list[str]:
    """The tests that reach the change, at most so many seconds of them: first those that mirror the module, then
    those of the files where most tests reach it; in a file the fastest first."""
    anywhere = mutation.block.endswith("<module>:0")
    mirrors = _mirrors(mutation.module)
    files = []
    for name, entry in reach.items():
        tests = [
            (test["seconds"], node)
            for node, test in entry["tests"].items()
            if (
                any(block.startswith(f"{mutation.module}:") for block in test["blocks"])
                if anywhere
                else mutation.block in test["blocks"]
            )
        ]
        if tests:
            files.append((mirrors.index(name) if name in mirrors else len(mirrors), -len(tests), sorted(tests)))
    found, spent = [], 0.0
    for _, _, tests in sorted(files):
        for took, node in tests:
            if spent + took <= seconds or not found:
                found.append(node)
                spent += took
    return found


def _mirrors(module: str) -> list[str]:
    folder, stem = module.split("/")[0], Path(module).stem
    if module.startswith("core/kernels/"):
        return ["core/test_kernels.py", f"core/test_{stem}.py", "core/test_far_from_origin.py"]
    return [f"{folder}/test_{stem}.py", *MIRRORS.get(module, [])]


class FirstFailure:
    """A plugin of pytest: the test that killed the mutant."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid)


def run_mutant(copy: Copy, mutation: Mutation, tests: list[str], limit: float) -> dict[str, Any]:
    path = ROOT / "kme_dist" / mutation.module
    by = copy.root / "killed_by"
    by.unlink(missing_ok=True)
    copy.write(mutation.module, mutation.applied(path.read_text()))
    began = time.monotonic()
    try:
        call = lambda: int(pytest.main([*OPTIONS, "-x", *tests], plugins=[FirstFailure(by)]))  # noqa: E731
        code = copy.run(call, limit, copy.root / "mutant.log")
    finally:
        copy.write(mutation.module, path.read_text())
    shutil.rmtree(copy.root / "tmp", ignore_errors=True)
    outcome = "survived" if code == 0 else "hung" if code is None else "killed"
    failed = by.read_text() if by.exists() else ""
    if code != 0 and not passes(copy, [failed] if failed else tests, limit):
        outcome = "unsettled"
    return {
        "id": mutation.id,
        "outcome": outcome,
        "line": mutation.line,
        "seconds": round(time.monotonic() - began, 1),
        "tests": len(tests),
        "by": failed or ("" if code == 0 else f"exit code {code}"),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def passes(copy: Copy, tests: list[str], limit: float) -> bool:
    """Whether the tests pass on the package as it is."""
    code = copy.run(lambda: int(pytest.main([*OPTIONS, "-x", *tests])), limit, copy.root / "control.log")
    shutil.rmtree(copy.root / "tmp", ignore_errors=True)
    return code == 0


def diff(mutation: Mutation) -> str:
    source = (ROOT / "kme_dist" / mutation.module).read_text()
    pair = source.splitlines(), mutation.applied(source).splitlines()
    lines = [
        line for line in difflib.unified_diff(*pair, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))
    ]
    return "\n".join(f"    {line}" for line in lines)


# --- all of them -----------------------------------------------------------------------------------


def all_mutations(modules: Iterable[str]) -> dict[str, list[Mutation]]:
    return {name: mutations(name, (ROOT / "kme_dist" / name).read_text()) for name in modules}


def read_results() -> dict[str, dict[str, Any]]:
    if not RESULTS.exists():
        return {}
    return {entry["id"]: entry for entry in map(json.loads, RESULTS.read_text().splitlines())}


def read_explained() -> dict[str, str]:
    if not SURVIVORS.exists():
        return {}
    return {entry["id"]: entry["why"] for entry in tomllib.loads(SURVIVORS.read_text()).get("survivor", [])}


def judged(
    mutation: Mutation, files: list[str], copy: Copy, seconds: float, earlier: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, str]:
    """The outcome and the digest of the tests: of those that mirror the module and, if it survives them, of those that
    may reach it as well. None: the outcome is known, since these tests have not changed."""
    nothing = {"id": mutation.id, "outcome": "survived", "line": mutation.line, "tests": 0, "by": "", "seconds": 0}
    mirrors = [name for name in files if name in _mirrors(mutation.module)]
    entry, tried, digest = nothing, list[str](), ""
    for needed in (mirrors, mirrors + [name for name in files if name not in mirrors and _near(name, mutation.module)]):
        reach = record(copy, needed)
        tests = [
            node for node in chosen_tests(mutation, reach, seconds + 2 * seconds * bool(tried)) if node not in tried
        ]
        tried += tests
        digests = sorted({reach[node.split("::")[0].removeprefix("tests/")]["digest"] for node in tried})
        digest = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
        if not tests:
            continue
        if needed != mirrors and earlier and earlier["outcome"] == "survived" and earlier["digest"] == digest:
            return None, digest
        expected = sum(reach[n.split("::")[0].removeprefix("tests/")]["tests"][n]["seconds"] for n in tests)
        entry = {**run_mutant(copy, mutation, tests, 60 + 6 * expected), "tests": len(tried)}
        if entry["outcome"] != "survived":
            break
    return entry, digest


def _near(name: str, module: str) -> bool:
    """Whether a test file may reach the module: it is in the folder of its tests, or mentions it."""
    return name.split("/")[0] == module.split("/")[0] or Path(module).stem in (HERE / name).read_text()


def run(drawn: list[Mutation], files: list[str], copy: Copy, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The results of all, after those without one were run."""
    results, explained, began = read_results(), read_explained(), time.monotonic()
    for number, mutation in enumerate(drawn):
        if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
            break
        earlier = results.get(mutation.id)
        if earlier and (earlier["outcome"] in ("killed", "hung") or mutation.id in explained):
            continue
        entry, digest = judged(mutation, files, copy, given.seconds, earlier)
        if entry is None:
            continue
        results[mutation.id] = {**entry, "digest": digest}
        with RESULTS.open("a") as file:
            file.write(json.dumps(results[mutation.id]) + "\n")
        words = f"{entry['outcome']} ({entry['tests']} tests, {entry['seconds']} s)"
        print(f"{number + 1}/{len(drawn)} {words} {mutation.id}", flush=True)
    return results


def summary(drawn: list[Mutation], results: dict[str, dict[str, Any]]) -> int:
    """Prints the survivors and the share of the killed; the exit code."""
    explained = read_explained()
    done = [mutation for mutation in drawn if mutation.id in results]
    survivors = [mutation for mutation in done if results[mutation.id]["outcome"] == "survived"]
    for mutation in survivors:
        print(f"\nsurvived: kme_dist/{mutation.module}:{mutation.line} {mutation.id}")
        print(diff(mutation))
        print(f"    {explained.get(mutation.id, 'NOT EXPLAINED: write the test, or the reason why there can be none')}")
    unsettled = [mutation.id for mutation in done if results[mutation.id]["outcome"] == "unsettled"]
    for name in unsettled:
        print(f"\nunsettled: {name}: {results[name]['by']} fails without the change as well")
    hung = sum(results[mutation.id]["outcome"] == "hung" for mutation in done)
    killed = len(done) - len(survivors) - len(unsettled)
    unexplained = sum(mutation.id not in explained for mutation in survivors)
    share = killed / len(done) if done else 1.0
    print(f"\n{len(done)} mutants, {killed} killed ({100 * share:.1f} %; {hung} of them hung)", end=", ")
    print(f"{len(survivors)} survived, {unexplained} of them not explained, {len(unsettled)} unsettled")
    return int(share < REQUIRED or unexplained > 0 or bool(unsettled))


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests on changed copies of the package.")
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which mutants are drawn")
    parser.add_argument("--seconds", type=float, default=30, help="of tests for one mutant, as they were recorded")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so many")
    parser.add_argument("--record", action="store_true", help="record again what tests reach")
    parser.add_argument("--list", action="store_true", help="print what was found so far, and run nothing")
    parser.add_argument("--id", action="append", default=[], help="this mutant, again")
    parser.add_argument("modules", nargs="*", help="such as data/leases.py; default: those of MODULES")
    given = parser.parse_args()
    chosen = [name for name in given.modules or MODULES if name not in NOT_MUTATED]
    found = all_mutations(chosen)
    drawn = [mutation for mutation, _ in zip(sampled(found, given.seed), range(given.count), strict=False)]
    if given.id:
        drawn = [mutation for own in found.values() for mutation in own if mutation.id in given.id]
    if given.list:
        return summary(drawn, read_results())
    import_libraries()
    files = [path.relative_to(HERE).as_posix() for name in FOLDERS for path in sorted((HERE / name).glob("test_*.py"))]
    files = [name for name in files if name not in NOT_USED]
    if given.record:
        REACH.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="kme-mutants-") as folder:
        copy = Copy(Path(folder))
        if given.id and RESULTS.exists():
            kept = [line for line in RESULTS.read_text().splitlines() if json.loads(line)["id"] not in given.id]
            RESULTS.write_text("".join(line + "\n" for line in kept))
        return summary(drawn, run(drawn, files, copy, given))


if __name__ == "__main__":
    sys.exit(main())
