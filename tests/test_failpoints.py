"""Faults on request: nothing happens without the variable, and with it exactly what it says."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kme_dist import failpoints
from kme_dist.errors import ConfigError

PACKAGE = Path(failpoints.__file__).parent
PLACE = "ingest.before_shard"
PASS = f"from kme_dist.failpoints import passing; passing({PLACE!r}); print('passed')"


def run(setting, program=PASS):
    environment = {**os.environ, failpoints.VARIABLE: setting}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)


def places_in_code():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "passing":
                yield ast.literal_eval(node.args[0])


def test_the_table_lists_the_places_that_are_in_the_code():
    assert set(places_in_code()) == set(failpoints.PLACES)


def test_every_place_is_hit_by_a_scenario():
    """A scenario names its place; that the fault happens there is what it asserts."""
    written = "".join(path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "chaos").glob("test_*.py"))
    assert set(failpoints.PLACES) - set(re.findall(r"\"([a-z]+\.[a-z_]+)(?:@\d+)?[\":]", written)) == set()


def test_nothing_acts_without_the_variable():
    assert failpoints._SETTING == ""
    assert run("").stdout == "passed\n"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("ingest.nowhere:kill", "unknown place 'ingest.nowhere'; known: ingest.before_shard"),
        (f"{PLACE}:explode", "unknown action 'explode' of ingest.before_shard; known: kill, hang"),
        (f"{PLACE}", "unknown action ''"),
        (f"{PLACE}@0:kill", "the turn must be an integer >= 1"),
        (f"{PLACE}@x:kill", "the turn must be an integer >= 1"),
        (f"{PLACE}:slow", "slow takes a number of seconds"),
        (f"{PLACE}:hang=long", "hang takes a number of seconds"),
        (f"{PLACE}:raise=ENONSENSE", "raise takes a name of errno"),
        (f"{PLACE}:kill=9", "kill takes nothing"),
    ],
)
def test_what_cannot_be_understood_is_named(setting, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        failpoints.parse(setting)


def test_a_wrong_setting_is_noticed_at_the_first_place():
    done = run("ingest.nowhere:kill")
    assert done.returncode == 1
    assert "unknown place" in done.stderr


def test_kill_is_sigkill_at_the_given_turn():
    program = f"from kme_dist.failpoints import passing\nfor i in range(5): print(i, flush=True); passing({PLACE!r})"
    done = run(f"{PLACE}@3:kill", program)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "0\n1\n2\n")


def test_once_spares_the_processes_that_follow(tmp_path):
    setting = f"once={tmp_path},{PLACE}:kill"
    assert run(setting).returncode == -signal.SIGKILL
    assert (tmp_path / PLACE).read_text().isdecimal()
    assert run(setting).stdout == "passed\n"


def test_raise_has_the_requested_number():
    assert "OSError: [Errno 5] Input/output error (failpoint ingest.before_shard)" in run(f"{PLACE}:raise").stderr
    assert "OSError: [Errno 28] No space left on device" in run(f"{PLACE}:raise=ENOSPC").stderr


def test_slow_waits_every_time_and_hang_once():
    timed = (
        "import time; from kme_dist.failpoints import passing\n"
        f"for i in range(3): began = time.monotonic(); passing({PLACE!r}); print(time.monotonic() - began > 0.05)"
    )
    assert run(f"{PLACE}@2:slow=0.06", timed).stdout.split() == ["False", "True", "True"]
    assert run(f"{PLACE}@2:hang=0.06", timed).stdout.split() == ["False", "True", "False"]


def test_a_process_hangs_until_its_marker_is_removed(tmp_path):
    environment = {**os.environ, failpoints.VARIABLE: f"once={tmp_path},{PLACE}:hang"}
    child = subprocess.Popen([sys.executable, "-c", PASS], env=environment, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / PLACE).exists():
        assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.3)
    (tmp_path / PLACE).unlink()
    assert child.communicate(timeout=30)[0] == "passed\n"


def test_corrupt_flips_one_bit_of_the_largest_file(tmp_path):
    (tmp_path / "small").write_bytes(b"aaaa")
    (tmp_path / "large").write_bytes(bytes(100))
    program = (
        "import pathlib; from kme_dist.failpoints import passing\n"
        f"passing({PLACE!r}, lambda: [pathlib.Path({str(tmp_path)!r})])"
    )
    assert run(f"{PLACE}:corrupt", program).returncode == 0
    assert (tmp_path / "small").read_bytes() == b"aaaa"
    assert sum(byte.bit_count() for byte in (tmp_path / "large").read_bytes()) == 1
    assert "no local file is written at this place" in run(f"{PLACE}:corrupt").stderr
