"""The sweep over kinds of processors: nothing is left out by mistake, and a failure is told."""

from __future__ import annotations

import subprocess
import sys

import portable
import pytest
from ports import free_port


def test_every_test_file_is_a_test_of_numbers_or_left_out_by_name():
    found = {path.relative_to(portable.TESTS) for path in portable.TESTS.rglob("test_*.py")}
    assert set(portable.NOT_NUMBERS) <= {part for path in found for part in path.parts}, "a name without a file"
    swept = set(portable.test_files())
    assert {"tests/core/test_cg.py", "tests/models/test_estimators.py", "tests/test_backend.py"} <= swept
    left_out = {f"tests/{path.as_posix()}" for path in found} - swept
    assert all(portable.NOT_NUMBERS.keys() & set(name.split("/")) for name in left_out)


@pytest.mark.parametrize("kinds", [["A"], ["A", "B"], ["A", "B", "C", "D"]])
def test_every_kind_and_every_number_of_threads_has_its_run(kinds):
    runs = portable.plan(kinds, (1, 2, 4), full=False)
    assert {kind for kind, _ in runs} == set(kinds)
    assert {threads for _, threads in runs} == {1, 2, 4}
    assert len(set(portable.plan(kinds, (1, 2, 4), full=True))) == 3 * len(kinds)


def test_a_processor_does_without_what_it_lacks():
    here = ["X86_V3", "X86_V4", "AVX512_ICL"]
    old, new = (portable.environment(kind, 2, here) for kind in ("SANDYBRIDGE", "SKYLAKEX"))
    assert old["NPY_DISABLE_CPU_FEATURES"] == " ".join(here)
    assert "-FMA" in old["GLIBC_TUNABLES"]
    assert new["NPY_DISABLE_CPU_FEATURES"] == "AVX512_ICL"
    assert {old[f"{name}_NUM_THREADS"] for name in ("OPENBLAS", "OMP")} == {"2"}


@pytest.mark.parametrize(("body", "code", "line"), [("1 + 1 == 2", 0, "0 with failures"), ("False", 1, "FAILED ")])
def test_a_failure_is_named_and_changes_the_exit_code(tmp_path, body, code, line):
    (tmp_path / "test_one.py").write_text(f"def test_it():\n    assert {body}\n")
    command = [sys.executable, portable.__file__, "--kinds=NATIVE", "--threads=4", f"--logs={tmp_path / 'logs'}"]
    done = subprocess.run([*command, str(tmp_path / "test_one.py")], capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    assert line in done.stdout


def test_no_port_is_given_twice():
    ports = {free_port() for _ in range(20)}
    assert len(ports) == 20
