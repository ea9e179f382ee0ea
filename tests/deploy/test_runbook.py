"""The runbook: its commands are run as they stand, or checked where they need an engine, and it knows every alert."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deploy_tools import DEPLOY, FINAL, ROOT, TRY_AGAIN, call, tool
from ports import free_port
from test_command_lines import accepted

RUNBOOK = ROOT / "docs" / "operations.md"
PAGES = [RUNBOOK, DEPLOY / "README.md"]
ENGINES = {"docker", "kubernetes", "slurm", "systemd", "terminals"}


def blocks(page):
    """(what it needs or "", text) of every fenced block of shell commands."""
    found = re.findall(r"(?ms)^```(\S*)(?: needs=(\S+))?\n(.*?)^```$", page.read_text(encoding="utf-8"))
    assert {language for language, _, _ in found} <= {"sh", "text"}
    return [(needs, text) for language, needs, text in found if language == "sh"]


def test_there_is_no_command_that_nobody_checks():
    assert sum(not needs for needs, _ in blocks(RUNBOOK)) >= 8
    for page in PAGES:
        assert {needs for needs, _ in blocks(page)} <= {"", *ENGINES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_sound_shell(page, tmp_path):
    shellcheck = tool("shellcheck")
    script = tmp_path / "blocks.sh"
    # Blocks share one shell; SC2317 and SC2034 are about code that only a reader completes.
    script.write_text("#!/bin/bash\n" + "\n".join(text for _, text in blocks(page)))
    done = call(shellcheck, "--exclude=SC2317,SC2034", script)
    assert (done.returncode, done.stdout) == (0, "")


def commands(page, program):
    """Every call of a program, as words; variables stay as they are written."""
    for _, text in blocks(page):
        text = re.sub(r"(?ms)<< '(\w+)'\n.*?^\1$", "", text.replace("\\\n", " "))
        for line in text.splitlines():
            for part in re.split(r"\|\||&&|[|;&()]", line.split(" #")[0]):
                if part.strip().startswith(f"{program} "):
                    yield shlex.split(part.split(">")[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_takes_every_line(page):
    found = [*commands(page, "kme-dist"), *commands(page, "dask")]
    assert found
    for words in found:
        assert accepted(words) is None, words


def test_files_that_it_names_exist():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w/])deploy/[\w./@-]*[\w]", text):
            assert (ROOT / name).exists() or any(ROOT.glob(f"{name}*")), f"{page.name} names {name}"


def test_it_says_what_to_do_about_every_alert():
    alerts = set(re.findall(r"alert: (\w+)", (DEPLOY / "prometheus" / "alerts.yml").read_text()))
    rows = {row.split("|")[1].strip(): row for row in RUNBOOK.read_text().splitlines() if row.startswith("| ")}
    assert len(alerts) > 5
    for alert in alerts:
        assert alert in rows, f"the runbook is silent about {alert}"
        assert all(cell.strip() for cell in rows[alert].split("|")[1:-1])


def test_its_exit_codes_are_those_of_the_code():
    table = re.findall(r"(?m)^\| ([\d, ]+) \| .* \| (no|yes)\b", RUNBOOK.read_text())
    said = {int(code): answer for codes, answer in table for code in codes.split(",")}
    assert {code for code, answer in said.items() if answer == "no"} == {0, *FINAL}
    assert {code for code, answer in said.items() if answer == "yes"} == {TRY_AGAIN, 130, 143}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_does_what_it_should(tmp_path):
    """All blocks that need no engine, in one shell, in an empty folder; the first failure ends it."""
    port = free_port()
    script = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", "set -m"]
    for number, (needs, text) in enumerate(blocks(RUNBOOK)):
        if not needs:
            script += [f"echo '=== block {number}' >&2", text.replace("127.0.0.1:8786", f"127.0.0.1:{port}")]
    path = tmp_path / "runbook.sh"
    path.write_text("\n".join(script))
    folder = tmp_path / "here"
    folder.mkdir()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in ("KME_ROOT", "KME_TLS"):
        environment.pop(name, None)
    process = subprocess.Popen(
        ["bash", path],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=800)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    assert "passed: " in out
    assert "is already done" in err, "a second start of a night"
