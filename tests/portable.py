"""The tests of numbers as other processors would compute them: `make portable`, every combination with `FULL=1`.

A result depends on the processor through three libraries, and all three are told here, before they load, to behave as
they would elsewhere: OpenBLAS (both copies, NumPy's and SciPy's) takes the kernels of OPENBLAS_CORETYPE, NumPy leaves
out the loops that such a processor could not run, and the C library the variants of exp, log and pow that need fused
multiplication. Each run is a process of its own. What the libraries really did is asked of them and printed: a kind
whose answer is that of an earlier one is run once, and one that this processor cannot execute is left out by name.

By default every kind runs with one thread, and 2 and 4 threads run on one kind each, which is all that fits into 25
minutes on two cores; runs of one thread go side by side. A number of threads beyond the number of cores is set by hand
as soon as BLAS is there, since OpenBLAS takes no more from its environment than the machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent

# Every test file is a test of numbers, unless it is here: a file that is new belongs to the sweep by itself.
NOT_NUMBERS = {
    "cli": "exit codes and lines of the command",
    "config": "settings",
    "deploy": "files for machines: containers, units, Slurm, Kubernetes",
    "ops": "processes, jobs, certificates, metrics and pages",
    "paper": "published figures: hours, by make paper",
    "test_expressions.py": "a parser",
    "test_feature_plots.py": "pictures",
    "test_layers.py": "imports",
    "test_meter.py": "counters",
    "test_packaging.py": "what is built",
    "test_portable.py": "the sweep itself",
    "test_public_names.py": "names",
    "test_report.py": "pages",
    "test_run_folder.py": "files of a run",
    "test_security.py": "refusals",
    "test_smoke.py": "exit codes of the smoke command",
}

KINDS = {
    "x86_64": ("SKYLAKEX", "HASWELL", "ZEN", "SANDYBRIDGE", "NEHALEM"),
    "aarch64": ("ARMV8", "NEOVERSEN1", "NEOVERSEV1", "THUNDERX2T99"),
}
NATIVE = "NATIVE"  # whatever this machine is; for platforms that are not in the list
THREADS = (1, 2, 4)

# What a kind of processor lacks: NumPy's names (of 2.4 and of those before), and those of the C library.
_512 = ("X86_V4", "AVX512")
_256 = ("X86_V3", "AVX2", "FMA3")
LACKS: dict[str, tuple[tuple[str, ...], str]] = {
    "SKYLAKEX": (("AVX512_ICL", "AVX512_SPR", "AVX512_CNL"), ""),
    "HASWELL": (_512, ""),
    "ZEN": (_512, ""),
    "SANDYBRIDGE": (_512 + _256, "-AVX2,-FMA,-FMA4"),
    "NEHALEM": (_512 + _256 + ("AVX", "F16C"), "-AVX2,-FMA,-FMA4,-AVX"),
}


def test_files() -> list[str]:
    """The files with tests of numbers, relative to the top of the repository."""
    found = (path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
    numbers = (path for path in found if not NOT_NUMBERS.keys() & {path.parts[0], path.name})
    return sorted(f"{TESTS.name}/{path.as_posix()}" for path in numbers)


def environment(kind: str, threads: int, dispatched: list[str]) -> dict[str, str]:
    """The variables under which a process computes as on such a processor; `dispatched` is what NumPy uses here."""
    lacks, hardware = LACKS.get(kind, ((), ""))
    found = {
        "OPENBLAS_CORETYPE": "" if kind == NATIVE else kind,
        "NPY_DISABLE_CPU_FEATURES": " ".join(f for f in dispatched if f.startswith(lacks)),
    }
    if hardware:
        found["GLIBC_TUNABLES"] = f"glibc.cpu.hwcaps={hardware}"
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        found[name] = str(threads)
    return {**os.environ, **{name: value for name, value in found.items() if value}}


# --- inside a process of its own --------------------------------------------------------------------


def libraries(threads: int) -> dict[str, object]:
    """What NumPy and both copies of BLAS say that they are, after they have been made to do some work."""
    import numpy as np
    import scipy.linalg
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
    from threadpoolctl import threadpool_info, threadpool_limits

    # For the life of the process: never restored.
    threadpool_limits(limits=threads, user_api="blas")
    for dtype in ("float32", "float64"):
        A = np.random.default_rng(0).standard_normal((300, 300)).astype(dtype)
        scipy.linalg.cholesky(A @ A.T + 300 * np.eye(300, dtype=dtype))
        np.exp(A)
    blas = [each for each in threadpool_info() if each["user_api"] == "blas"]
    owners = {_owner(each["filepath"]): str(each.get("architecture")) for each in blas}
    return {
        "blas": dict(sorted(owners.items())),
        "threads": sorted({each["num_threads"] for each in blas}),
        "numpy": [feature for feature in __cpu_dispatch__ if __cpu_features__.get(feature)],
    }


def _owner(path: str) -> str:
    return next((name for name in ("numpy", "scipy") if f"{name}.libs" in path or f"/{name}/" in path), path)


class Tally:
    """Counts what pytest reports, and keeps the names of what failed."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, []  # type: int, list[str]

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run_here(threads: int, answer: Path, arguments: list[str]) -> None:
    """One run, in this process; what came out goes to `answer`."""
    found = libraries(threads)
    if arguments:
        import pytest

        tally = Tally()
        code = pytest.main(arguments, plugins=[tally])
        found |= {"passed": tally.passed, "failed": list(dict.fromkeys(tally.failed)), "code": int(code)}
    answer.write_text(json.dumps(found))


# --- the sweep --------------------------------------------------------------------------------------


def in_a_process(env: dict[str, str], threads: int, log: Path, arguments: list[str]) -> dict[str, object]:
    """`run_here` in a process with that environment; its output in `log`."""
    answer = log.with_suffix(".json")
    command = [sys.executable, __file__, "--here", str(threads), str(answer), *arguments]
    begin = time.monotonic()
    with log.open("w") as out:
        done = subprocess.run(command, env=env, cwd=TESTS.parent, stdout=out, stderr=subprocess.STDOUT, check=False)
    found = json.loads(answer.read_text()) if answer.exists() else {"died": done.returncode}
    return {**found, "seconds": time.monotonic() - begin}


def probe(kinds: tuple[str, ...], folder: Path) -> tuple[dict[str, dict], list[str]]:
    """Kinds that this machine can take on, with what its libraries then are, and a line for each of the others."""
    plain = in_a_process(dict(os.environ), 1, folder / "probe.log", [])
    dispatched = plain["numpy"]
    able: dict[str, dict] = {}
    lines = [f"this machine: {_said(plain)}"]
    for kind in kinds:
        found = in_a_process(environment(kind, 1, dispatched), 1, folder / f"probe-{kind}.log", [])
        same = [other for other, its in able.items() if _said(its) == _said(found)]
        if "died" in found:
            why = (
                "this processor cannot execute it" if found["died"] == -signal.SIGILL else f"ended with {found['died']}"
            )
            lines.append(f"{kind}: left out, {why}")
        elif same:
            lines.append(f"{kind}: {_said(found)}: the same as {same[0]}, run once")
        else:
            able[kind] = {**found, "dispatched": dispatched}
            lines.append(f"{kind}: {_said(found)}")
    return able, lines


def _said(found: dict) -> str:
    if "blas" not in found:
        return "no answer"
    copies = ", ".join(f"{owner} {architecture}" for owner, architecture in found["blas"].items())
    return f"BLAS of {copies}; NumPy's loops {' '.join(found['numpy']) or 'plain'}"


def plan(kinds: list[str], threads: tuple[int, ...], full: bool) -> list[tuple[str, int]]:
    """(kind, threads) of every run: each kind with the first number of threads, each further number on one kind."""
    if full or not kinds:
        return [(kind, count) for count in threads for kind in kinds]
    return [(kind, threads[0]) for kind in kinds] + [(kinds[i % len(kinds)], t) for i, t in enumerate(threads[1:])]


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--full", action="store_true", help="every kind with every number of threads")
    ask.add_argument("--kinds", default=",".join(KINDS.get(platform.machine(), (NATIVE,))))
    ask.add_argument("--threads", default=",".join(map(str, THREADS)))
    ask.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs of one thread at a time")
    ask.add_argument("--logs", type=Path, help="keep what the runs print in this folder")
    ask.add_argument("tests", nargs="*", help="instead of all tests of numbers; more arguments of pytest after --")
    options = ask.parse_args()
    folder = options.logs or Path(tempfile.mkdtemp(prefix="kme-portable-"))
    folder.mkdir(parents=True, exist_ok=True)
    able, lines = probe(tuple(options.kinds.split(",")), folder)
    print("\n".join(lines), flush=True)
    runs = plan(list(able), tuple(int(count) for count in options.threads.split(",")), options.full)
    begin = time.monotonic()

    def one(kind: str, threads: int) -> dict:
        env = environment(kind, threads, able[kind]["dispatched"])
        name = f"{kind}-{threads}"
        arguments = [*(options.tests or test_files()), "-q", "-p", "no:cacheprovider", "--timeout=900"]
        arguments += [f"--basetemp={folder / name}"]
        found = in_a_process(env, threads, folder / f"{name}.log", arguments)
        print(_row(kind, threads, found), flush=True)
        return {**found, "kind": kind, "run_threads": threads}

    print(
        f"logs in {folder}\n\n{'core type':<12} {'threads':>7} {'passed':>7} {'failed':>7} {'seconds':>8}", flush=True
    )
    alone = [run for run in runs if run[1] == 1]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda run: one(*run), alone))
    results += [one(*run) for run in runs if run[1] != 1]
    names: dict[str, list[str]] = {}
    for found in results:
        for name in found.get("failed", ["the process died"]):
            names.setdefault(name, []).append(f"{found['kind']}/{found['run_threads']}")
    for name, where in sorted(names.items()):
        print(f"FAILED {name}  [{', '.join(where)}]")
    bad = [found for found in results if found.get("code") != 0]
    print(f"{len(results)} runs, {len(bad)} with failures, {time.monotonic() - begin:.0f} s")
    return 1 if bad or not results else 0


def _row(kind: str, threads: int, found: dict) -> str:
    counts = (found.get("passed", "-"), len(found["failed"]) if "failed" in found else f"died {found.get('died')}")
    return f"{kind:<12} {threads:>7} {counts[0]:>7} {counts[1]:>7} {found['seconds']:>8.0f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        run_here(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main())
