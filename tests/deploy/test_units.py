"""Timers of one machine: systemd units and cron. Each repeats what may succeed later, and nothing else."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from deploy_tools import DEPLOY, FINAL, TRY_AGAIN, call, packaged_folders, tool

SYSTEMD = DEPLOY / "systemd"
SERVICES = sorted(SYSTEMD.glob("*.service"))
UNITS = [*SERVICES, *SYSTEMD.glob("*.timer")]
INSTALL = SYSTEMD / "install"
RETRY = DEPLOY / "kme-retry"
CRON = DEPLOY / "cron" / "kme-dist"


def unit(name):
    """A unit file; of keys that may repeat the last one counts."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read_string((SYSTEMD / name).read_text().replace("\\\n", " "))
    return parser


# --- systemd ----------------------------------------------------------------------------------------


def verify(folder, *names):
    """What `systemd-analyze verify` says, with the programs of the units replaced by one that is there."""
    folder.mkdir(exist_ok=True)
    for path in UNITS:
        text = re.sub(r"(?m)^ExecStart=/opt/kme-dist/bin/\S+", f"ExecStart={sys.executable}", path.read_text())
        (folder / path.name).write_text(text)
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"}
    return lambda: call(
        tool("systemd-analyze"), "verify", "--man=no", *(folder / name for name in names), env=environment
    )


def test_systemd_takes_the_units(tmp_path):
    names = [path.name.replace("@.", "@1.") for path in UNITS]
    for template in SYSTEMD.glob("*@.service"):
        (tmp_path / template.name.replace("@.", "@1.")).symlink_to(tmp_path / template.name)
    done = verify(tmp_path, *names)()
    assert ours(done) == []
    assert done.returncode == 0


def test_the_installer_copies_everything_that_is_packaged():
    (listed,) = re.findall(r"(?m)^for name in (.*); do\n +cp ", INSTALL.read_text())
    assert packaged_folders() | {"pyproject.toml", "constraints.txt"} <= set(listed.split())


def ours(done):
    """Lines about our units; others of the machine may have troubles of their own."""
    return [line for line in (done.stdout + done.stderr).splitlines() if "kme-dist" in line]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("kme-dist-nightly.service", "RestartSec=", "RestartSeconds="),
        ("kme-dist-nightly.service", "Restart=on-failure", "Restart=always"),  # no oneshot may have it
        ("kme-dist-nightly.timer", "02:30:00 UTC", "25:30:00 UTC"),
    ],
)
def test_the_check_of_units_refuses_mistakes(tmp_path, name, right, wrong):
    check = verify(tmp_path, name)
    text = (tmp_path / name).read_text()
    assert right in text
    (tmp_path / name).write_text(text.replace(right, wrong))
    assert ours(check()) != []


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)
def test_services_are_locked_in(path):
    analyze = [tool("systemd-analyze"), "security", "--offline=true", "--no-pager"]
    assert call(*analyze, "--threshold=20", path).returncode == 0
    assert call(*analyze, "--threshold=5", path).returncode != 0, "the check must be able to fail"


def test_the_nightly_service_repeats_what_may_succeed_later():
    service = unit("kme-dist-nightly.service")["Service"]
    assert service["Type"] == "oneshot", "a unit that runs is not started twice"
    assert service["Restart"] == "on-failure"
    refused = [int(code) for code in service["RestartPreventExitStatus"].split()]
    assert refused == FINAL
    assert TRY_AGAIN not in refused
    limits = unit("kme-dist-nightly.service")["Unit"]
    assert int(limits["StartLimitBurst"]) > 1
    assert "StartLimitIntervalSec" in limits


def test_a_missed_night_is_made_up_for():
    timer = unit("kme-dist-nightly.timer")["Timer"]
    assert timer["Persistent"] == "true"
    assert timer["OnCalendar"].endswith("UTC")
    analyze = tool("systemd-analyze")
    assert call(analyze, "calendar", timer["OnCalendar"]).returncode == 0
    assert call(analyze, "calendar", "*-*-* 25:00:00").returncode != 0


@pytest.mark.parametrize("name", ["kme-dist-scheduler.service", "kme-dist-worker@.service"])
def test_the_cluster_comes_back_whatever_it_returns(name):
    """A worker that lost its scheduler ends with exit code 0."""
    assert unit(name)["Service"]["Restart"] == "always"


def test_the_scheduler_listens_with_tls_and_its_dashboard_on_loopback():
    words = shlex.split(unit("kme-dist-scheduler.service")["Service"]["ExecStart"])
    assert words[words.index("--protocol") + 1] == "tls"
    assert words[words.index("--dashboard-address") + 1].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "none"], "--workers is none; must be an integer >= 1"),
        (["--workers", "0"], "must be an integer >= 1"),
        (["--workers", "1001"], "must be at most 1000"),
        (["--workers"], "--workers requires a value"),
        (["--worker", "2"], "--worker is not an option"),
        (["--scheduler", "first:8786"], "must be tls://HOST:PORT"),
        (["--scheduler", "tls://first:8786", "--certificates", "/nowhere"], "/nowhere/ca.pem does not exist"),
        (["--certificates", "/nowhere"], "/nowhere/ca.pem does not exist"),
    ],
)
def test_the_installer_refuses_what_it_cannot_do_before_it_does_anything(words, said):
    done = call(INSTALL, *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_installer_explains_itself():
    done = call(INSTALL, "--help")
    assert done.returncode == 0
    options = set(re.findall(r"(?m)^        (--[a-z-]+)\)", INSTALL.read_text()))
    assert len(options) >= 7
    for option in options:
        assert option in done.stdout + "--help"


# --- kme-retry --------------------------------------------------------------------------------------


SCRIPTS = [RETRY, INSTALL, *sorted((DEPLOY / "slurm").iterdir())]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    done = call(tool("shellcheck"), path)
    assert (done.returncode, done.stdout) == (0, "")


def test_shellcheck_refuses_mistakes(tmp_path):
    broken = tmp_path / "retry"
    broken.write_text(RETRY.read_text().replace('"$@" &', "$@ &"))
    assert "SC2068" in call(tool("shellcheck"), broken).stdout


@pytest.fixture
def answering(tmp_path):
    """A function: a command that returns the given exit codes, one after the other, and counts its starts."""

    def make(*codes):
        (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
        script = tmp_path / "command"
        script.write_text(
            f"#!/bin/sh\ncd {tmp_path}\necho x >> starts\n"
            'code=$(sed -n "$(wc -l < starts)p" codes)\nexit "${code:-0}"\n'
        )
        script.chmod(0o755)
        environment = {**os.environ, "KME_ATTEMPTS": "3", "KME_RETRY_WAIT": "0"}
        done = call(RETRY, script, env=environment)
        return done.returncode, len((tmp_path / "starts").read_text().split())

    return make


@pytest.mark.parametrize("code", [0, *FINAL, 130, 143])
def test_whatever_is_final_is_handed_on_at_once(answering, code):
    assert answering(code, 0) == (code, 1)


def test_try_again_is_tried_again(answering):
    assert answering(TRY_AGAIN, TRY_AGAIN, 0) == (0, 3)


def test_a_later_failure_ends_the_attempts(answering):
    assert answering(TRY_AGAIN, FINAL[-1], 0) == (FINAL[-1], 2)


def test_attempts_are_bounded(answering):
    assert answering(*[TRY_AGAIN] * 5) == (TRY_AGAIN, 3)


def test_retry_without_a_command_is_the_user_s_mistake():
    assert call(RETRY).returncode == 2


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_command_and_it_may_take_its_time(tmp_path, sent, code):
    script = tmp_path / "command"
    script.write_text(
        f"#!/bin/sh\ntrap 'sleep 0.3; echo saved > {tmp_path}/state; exit 143' TERM\n"
        f"echo ready > {tmp_path}/ready\nwhile :; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    process = subprocess.Popen([RETRY, script], start_new_session=True)
    try:
        wait_for(tmp_path / "ready")
        process.send_signal(sent)
        assert process.wait(timeout=20) == code
    finally:
        if process.poll() is None:  # it did not end: nor did the command
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (tmp_path / "state").read_text() == "saved\n"


def wait_for(path):
    for _ in range(400):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


# --- cron -------------------------------------------------------------------------------------------


def cron_table():
    """Settings and entries (schedule, user, command) of the table."""
    settings, entries = {}, []
    for line in CRON.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if match := re.fullmatch(r"([A-Z_]+)=(.*)", line):
            settings[match.group(1)] = match.group(2)
        else:
            *schedule, user, command = line.split(None, 6)
            entries.append((" ".join(schedule), user, command))
    return settings, entries


def test_cron_can_read_the_table():
    croniter = pytest.importorskip("croniter")
    settings, entries = cron_table()
    assert CRON.read_text().endswith("\n"), "cron ignores a last line without its end"
    assert "." not in CRON.name, "cron passes over files with a dot in their name"
    assert settings["SHELL"] == "/bin/sh"
    for schedule, user, command in entries:
        assert croniter.croniter.is_valid(schedule)
        assert user == "kme"
        assert "%" not in command, "cron makes a line break of it"
    assert not croniter.croniter.is_valid("30 25 * * *")


def test_commands_of_cron_are_sound_shell(tmp_path):
    shellcheck = tool("shellcheck")
    for _, _, command in cron_table()[1]:
        script = tmp_path / "command"
        script.write_text(f"#!/bin/sh\n{command}\n")
        done = call(shellcheck, script)
        assert (done.returncode, done.stdout) == (0, "")
        script.write_text(f"#!/bin/sh\n{command}; if\n")
        assert call(shellcheck, script).returncode != 0


def test_a_second_start_by_cron_says_try_again(tmp_path):
    """The line of the table with stand-ins for the commands: the lock lets one through."""
    (line,) = [command for _, _, command in cron_table()[1] if "flock" in command]
    flock = tool("flock")
    for name, text in {
        "kme-retry": f'exec {RETRY} "$@"',
        "kme-dist": f"echo $$ >> {tmp_path}/starts; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = line.replace("/var/lib/kme-dist", str(tmp_path))
    environment = {"PATH": f"{tmp_path}:{os.path.dirname(flock)}:/usr/bin:/bin"}
    first = subprocess.Popen(["/bin/sh", "-c", command], env=environment)
    wait_for(tmp_path / "starts")
    assert call("/bin/sh", "-c", command, env=environment).returncode == TRY_AGAIN
    (tmp_path / "go").touch()
    assert first.wait(timeout=20) == 0
    assert len((tmp_path / "starts").read_text().split()) == 1
