"""What commands share: options, each defined once, what they print, and modules that are loaded when needed.

A command takes records: every field of a record becomes an option of the command.

    @app.command()
    @expand_options
    def plan(config: DatasetConfig, options: ConfigOptions, output: Output) -> None: ...

is `kme-dist plan CONFIG [--set ...] [--scheduler ...] [--json] [--quiet]`. Results go to stdout, messages to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import typer

from kme_dist.config import ClusterConfig, Config, load_config
from kme_dist.errors import ConfigError
from kme_dist.ops.certs import tls_files
from kme_dist.ops.jobs import Job, job_at, job_root

DatasetConfig = Annotated[Path, typer.Argument(help="YAML file whose data.source is a data set.")]
TableConfig = Annotated[
    Path, typer.Argument(help="YAML file whose data.source is a data set or a table (CSV, Parquet, npz, ...).")
]
JobConfig = Annotated[Path, typer.Argument(help="YAML file with paths relative to the root.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key of the config.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Recompute even if an earlier result is up to date.")]
Scheduler = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Address of a running Dask scheduler, e.g. tls://host:8786.")
]
Tls = Annotated[str | None, typer.Option(metavar="DIR", help="Folder of `kme-dist certs`; default: KME_TLS.")]
Insecure = Annotated[bool, typer.Option("--allow-insecure", help="Allow connections to other machines without TLS.")]
Root = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder of jobs and data; default: KME_ROOT, else the current folder."),
]
OnModelChange = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT", help="Predictions of an earlier model: recompute them, refuse (default), or start a new-folder."
    ),
]
Pipeline = Annotated[str, typer.Option(help="run, learn, fit, predict or evaluate.")]


def load(name: str) -> ModuleType:
    """A module of the package by its path below kme_dist, e.g. `load("pipelines.learn")`.

    Loaded when a command needs it: `kme-dist --help` waits neither for NumPy nor for Dask.
    """
    return importlib.import_module(f"kme_dist.{name}")


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take records of options, whose fields typer sees as parameters of the command."""
    hints = get_type_hints(command, include_extras=True)
    records, parameters = {}, []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            records[parameter.name] = kind
            options = get_type_hints(kind, include_extras=True)
            found = {f.name: (inspect.Parameter.empty if f.default is MISSING else f.default) for f in fields(kind)}
        else:
            options, found = {parameter.name: kind}, {parameter.name: parameter.default}
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=options[name])
            for name, default in found.items()
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        filled = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in records.items()}
        command(**given, **filled)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True)
class Output:
    """What every command takes: how to print its result and its messages."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print no progress and no messages, only results and errors.")
    ] = False

    def say(self, line: str) -> None:
        """A message to a person, on stderr."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def result(self, result: Any, *lines: str) -> None:
        """A result as JSON, or as lines for a person."""
        if self.as_json:
            print_json(result)
            return
        for line in lines:
            print(line)


@dataclass(frozen=True)
class ConfigOptions:
    """Of commands that read a config and may use a cluster."""

    overrides: Overrides = None
    scheduler: Scheduler = None
    tls: Tls = None

    def cluster_section(self) -> dict[str, Any]:
        """The keys of the section `cluster` that --scheduler and --tls set."""
        section: dict[str, Any] = {} if self.scheduler is None else {"kind": "address", "address": self.scheduler}
        return section if self.tls is None else {**section, "tls": tls_files(self.tls).model_dump(mode="json")}

    def load(self, path: Path, changes: list[str] | None = None) -> Config:
        """The config with --set, further `changes`, --scheduler and --tls applied, in this order."""
        cluster = [f"cluster.{key}={json.dumps(value)}" for key, value in self.cluster_section().items()]
        return load_config(path, self.overrides or [], [*(changes or []), *cluster])


@dataclass(frozen=True)
class StageOptions(ConfigOptions):
    """Of commands that run a stage on a cluster."""

    performance: Annotated[
        Path | None,
        typer.Option("--performance-report", metavar="FILE", help="Write Dask's performance report (HTML)."),
    ] = None

    @contextlib.contextmanager
    def performance_notice(self, say: Callable[[str], None]) -> Iterator[None]:
        """Say where the performance report of the block was written, or that there is none."""
        file = self.performance

        def written() -> float | None:
            return file.stat().st_mtime if file is not None and file.exists() else None

        before = written()
        yield
        if file is not None:
            nothing = "no performance report: this command did not use a cluster"
            say(nothing if written() == before else f"performance report: {file}")


@dataclass(frozen=True)
class Connection:
    """Of commands for jobs: how to reach a running scheduler."""

    scheduler: Scheduler = None
    tls: Tls = None
    insecure: Insecure = False

    def cluster(self, known: ClusterConfig | None = None) -> ClusterConfig | None:
        """By the command line first, then by `known`; None without an address."""
        known = known or ClusterConfig()
        address = self.scheduler or known.address
        if address is None:
            return None
        return ClusterConfig(
            kind="address",
            address=address,
            tls=tls_files(self.tls) if self.tls is not None else known.tls,
            insecure=self.insecure or known.insecure,
        )


@dataclass(frozen=True)
class JobOptions:
    """Of commands for one job."""

    job_id: Annotated[str, typer.Argument(metavar="ID", help="Job id, as printed by `submit`.")]
    root: Root = None

    def job(self) -> Job:
        return job_at(job_root(self.root), self.job_id)


def covered(result: Mapping[str, Any]) -> str:
    """How many true values are in their intervals, and how many were requested."""
    nominal = result.get("nominal_coverage")
    asked = "" if nominal is None else f" of {100 * nominal:g} % intervals"
    return f"coverage {100 * result['coverage']:.1f} %{asked}"


def split_names(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def split_pairs(given: list[str] | None, option: str) -> dict[str, str] | None:
    """Repeated NAME=FILE."""
    if not given:
        return None
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"{option} {text}: must be NAME=FILE")
        found[name] = path
    return found


# --- printing ---------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def print_tree(facts: Mapping[str, Any], *, width: int = 160, indent: int = 0) -> None:
    """Nested facts as indented `name  value` lines, each value cut at `width` characters."""
    column = max((len(str(key)) for key in facts), default=0)
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            print(f"{' ' * indent}{key}")
            print_tree(value, width=width, indent=indent + 2)
        else:
            text = _to_text(str(key), value)
            print(f"{' ' * indent}{key!s:{column}}  {text if len(text) <= width else text[: width - 3] + '...'}")


def _to_text(key: str, value: Any) -> str:
    if key.endswith("bytes") and isinstance(value, int):
        return _bytes(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "; ".join(_to_text(key, item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_to_text(name, inner)}" for name, inner in value.items()) or "none"
    return str(value)


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
