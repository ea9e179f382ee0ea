"""Every command line in deploy/ is one that the installed programs take: a misspelt option fails here, not at night."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex

import click
import pytest
import typer
import yaml
from deploy_tools import DEPLOY, OVERLAYS, all_containers, call, overlay, package_folder

from kme_dist.cli import app as cli
from kme_dist.config import load_config


def command_lines():
    """(where, words) of everything that deploy/ starts, as the shell or the engine would split it."""
    for where, words in raw_command_lines():
        if words[-3:-1] == ["sh", "-c"] or words[:2] == ["/bin/sh", "-c"]:
            # A shell of its own, for the time of the night or the port of a worker; what that gives has a test below.
            inner = words[-1].removeprefix("exec ")
            inner = re.sub(r"\$+\(\(8790 \+ %i\)\)", "8791", inner)
            words = [*words[:-3], *shlex.split(re.sub(r'"\$+\(.*\)\S*"', "2026-03-01T02:30:00Z", inner))]
        yield where, words


def raw_command_lines():
    for name in OVERLAYS:
        for container in all_containers(overlay(name)):
            yield f"kubernetes {name} {container['name']}", container["args"]
    for name, service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        if "build" in service:
            yield f"compose {name}", service["command"]
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read_string(path.read_text().replace("\\\n", " "))
        defaults = re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"(?m)^Environment=(.*)$", path.read_text())))
        command = unit["Service"]["ExecStart"]
        for name, value in defaults:
            command = command.replace(f"${{{name}}}", value)
        yield path.name, shlex.split(command)
    for line in (DEPLOY / "cron" / "kme-dist").read_text().splitlines():
        if "kme-dist" in line and line[0].isdigit():
            line = re.sub(r'"\$\(.*?\)\S*"', "2026-03-01T02:30:00Z", line)
            yield "cron", shlex.split(line.split("&&")[-1].split(">>")[0])
    for line in (DEPLOY / "slurm" / "allocation").read_text().replace("\\\n", " ").splitlines():
        if line.startswith("dask scheduler"):
            yield "slurm", shlex.split(line.removesuffix("&").replace('"${tls[@]}"', ""))


CASES = [(where, [word.rsplit("/", 1)[-1] if n == 0 else word for n, word in enumerate(words)])
         for where, words in command_lines()]  # fmt: skip


def night_of(script, folder, **environment):
    """The --at that a shell makes of the command of a nightly job, with a stand-in for kme-dist."""
    (folder / "kme-dist").write_text('#!/bin/sh\nwhile [ "$1" != --at ]; do shift; done\necho "$2"\n')
    (folder / "kme-dist").chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return call("/bin/sh", "-c", script.replace("/opt/kme-dist/bin/", ""), env={**path, **environment}).stdout.strip()


def test_a_night_has_one_name_however_often_it_is_started(tmp_path):
    scripts = {
        where: words[-1] for where, words in raw_command_lines() if words[-2:-1] == ["-c"] and "--at" in words[-1]
    }
    assert len(scripts) == 4
    for where, script in scripts.items():
        plain = script.replace("$$", "$")  # what Kubernetes, compose and systemd make of it
        minutes = 29_538_870  # a Job of a CronJob is called by the minutes since 1970
        night = night_of(plain, tmp_path, JOB_NAME=f"kme-dist-nightly-{minutes}")
        if where.startswith("kubernetes"):
            assert night == "2026-03-01T02:30:00Z"
        else:
            assert re.fullmatch(r"20\d\d-\d\d-\d\dT02:30:00Z", night)
            assert night_of(plain, tmp_path) == night


DATE = """#!/bin/sh
# date, as of $NOW
case "$*" in
    *-d*) while [ "$#" -gt 0 ]; do
        case "$1" in -d) shift; when=$1 ;; *) rest="$rest $1" ;; esac; shift; done
        exec /bin/date -d "$NOW $when" $rest ;;
    *) exec /bin/date -d "$NOW" "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("where", "zone", "now", "night"),
    [
        ("kme-dist-nightly.service", "UTC", "2026-03-02 02:30:00 UTC", "2026-03-02"),
        ("kme-dist-nightly.service", "UTC", "2026-03-02 02:40:00 UTC", "2026-03-02"),
        ("kme-dist-nightly.service", "UTC", "2026-03-02 09:00:00 UTC", "2026-03-02"),
        # A machine that was off, and boots before the next night: that one keeps its own name.
        ("kme-dist-nightly.service", "UTC", "2026-03-02 01:15:00 UTC", "2026-03-01"),
        ("cron", "UTC", "2026-03-02 02:30:00 UTC", "2026-03-02"),
        # Two nights of different dates in UTC, or of the same one where clocks went forward in between.
        ("cron", "Europe/Helsinki", "2026-03-28 02:30:00 +0200", "2026-03-28"),
        ("cron", "Europe/Helsinki", "2026-03-29 02:30:00 +0200", "2026-03-29"),
        ("cron", "Europe/Helsinki", "2026-03-30 02:30:00 +0300", "2026-03-30"),
    ],
)
def test_every_night_has_a_name_of_its_own(tmp_path, where, zone, now, night):
    (tmp_path / "date").write_text(DATE)
    (tmp_path / "date").chmod(0o755)
    if where == "cron":
        (line,) = (line for line in (DEPLOY / "cron" / "kme-dist").read_text().splitlines() if "--at" in line)
        script = line[line.index("kme-dist schedule") : line.index(" >>")]
    else:
        script = dict(raw_command_lines())[where][-1].replace("$$", "$")
    assert night_of(script, tmp_path, TZ=zone, NOW=now) == f"{night}T02:30:00Z"


def test_a_night_in_a_container_is_called_as_the_host_says(tmp_path):
    script = dict(raw_command_lines())["compose nightly"][-1].replace("$$", "$")
    assert night_of(script, tmp_path, KME_NIGHT="2026-03-29") == "2026-03-29T02:30:00Z"


def test_every_worker_has_a_port_of_its_own(tmp_path):
    (tmp_path / "dask").write_text('#!/bin/sh\nwhile [ "$1" != --dashboard-address ]; do shift; done\necho "$2"\n')
    (tmp_path / "dask").chmod(0o755)
    script = dict(raw_command_lines())["kme-dist-worker@.service"][-1].replace("$$", "$")
    script = re.sub(r"\$\{\w+\}", "x", script).replace("/opt/kme-dist/bin", str(tmp_path))
    for number, port in ((1, 8791), (2, 8792), (10, 8800)):
        assert call("/bin/sh", "-c", script.replace("%i", str(number))).stdout.strip() == f"127.0.0.1:{port}"
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][1]
    (pattern,) = scraped["file_sd_configs"][0]["files"]
    (listed,) = (DEPLOY / "prometheus").glob(pattern)
    assert json.loads(listed.read_text()) == [{"targets": ["127.0.0.1:8791", "127.0.0.1:8792"]}]


def accepted(words):
    """What is wrong with a command line; None when the program takes it."""
    while words[0] in ("kme-retry", "flock"):
        words = words[words.index("kme-retry") + 1 :] if "kme-retry" in words else words[5:]
    match words:
        case ["dask", "cuda", "worker", *rest]:
            unknown = {word for word in rest if word.startswith("--")} - cuda_options()
            return f"no such option: {sorted(unknown)}" if unknown else None
        case ["dask", ("scheduler" | "worker") as role, *rest]:
            from distributed.cli import dask_scheduler, dask_worker

            program = {"scheduler": dask_scheduler, "worker": dask_worker}[role].main
            try:
                context = program.make_context(role, [word for word in rest if not word.startswith("${")])
            except click.ClickException as error:
                return error.format_message()
            left = context.params["preload_argv"]  # where it puts what it does not know, for modules that are loaded
            return f"no such option: {left}" if left else None
        case ["kme-dist", name, *rest]:
            group = typer.main.get_command(cli.app)
            if name not in group.commands:
                return f"no such command: {name}"
            try:
                group.commands[name].make_context(name, list(rest))
            except cli.ClickException as error:
                return error.format_message()
            return None
    return f"unknown program: {words[0]}"


def cuda_options():
    """The options of GPU workers, read without importing a package that needs a GPU."""
    tree = ast.parse((package_folder("dask_cuda") / "cli.py").read_text())
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {part for text in strings if text.startswith("--") for part in text.split("/")}


@pytest.mark.parametrize(("where", "words"), CASES, ids=[where.replace(" ", "-") for where, _ in CASES])
def test_the_program_takes_the_command_line(where, words):
    assert accepted(words) is None


@pytest.mark.parametrize(
    "line",
    [
        "dask worker tls://scheduler:8786 --nthread 1",
        "dask scheduler --protocoll tls",
        "kme-dist smok",
        "kme-dist smoke nightly.yaml --folders x",
        "kme-retry kme-dist smoke --folders x",
        "dsak worker",
    ],
)
def test_a_misspelt_one_is_refused(line):
    assert accepted(shlex.split(line)) is not None


def test_all_ways_to_deploy_end_in_a_smoke_command():
    smoke = {where.split()[0] for where, words in CASES if "smoke" in words}
    assert {"kubernetes", "compose", "cron"} <= smoke
    assert 'RUN ["kme-dist", "smoke"]' in (DEPLOY / "Dockerfile").read_text()
    assert "set -- smoke" in (DEPLOY / "slurm" / "allocation").read_text()


CONFIGURATIONS = [DEPLOY / "nightly.yaml", *(DEPLOY / "kubernetes").glob("*/files/nightly.yaml"),
                  *(DEPLOY / "kubernetes").glob("*/files/learn.yaml")]  # fmt: skip


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_configurations_are_complete(path):
    config = load_config(path)
    assert config.cluster.address.startswith("tls://")
    paths = [config.data.source, config.predict.data, config.predict.model, config.predict.out]
    assert not any(path and path.startswith("/") for path in paths), "a job takes paths under its root"
