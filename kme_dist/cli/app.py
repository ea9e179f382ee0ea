"""The command `kme-dist`: parse, call a pipeline, print.

    kme-dist run configs/digits.yaml --set learn.steps=200
    kme-dist ingest table.csv table.zarr --label species
    kme-dist plan configs/covtype.yaml
    kme-dist learn configs/covtype.yaml
    kme-dist inspect runs/digits
    kme-dist doctor
    kme-dist config-schema

Results go to stdout (with --json as one JSON object), progress and messages to stderr. Exit codes:
0 done, 1 a bug of ours with its traceback, 2 the user's input, 3 numerical failure, 65 stored data
corrupt or missing, 75 try again, 130 and 143 interrupted. Errors in the input are reported in one line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from kme_dist.cli import jobs as job_commands
from kme_dist.cli import predict as predict_commands
from kme_dist.cli.lazy import load
from kme_dist.cli.options import (
    AsJson,
    DatasetConfig,
    Fresh,
    Insecure,
    Overrides,
    Performance,
    Quiet,
    Scheduler,
    cluster_overrides,
    performance_notice,
    split_names,
)
from kme_dist.cli.output import print_json, print_result, print_tree, stderr_printer
from kme_dist.config import ClusterConfig, json_schema, load_config, parse_yaml
from kme_dist.errors import KMEError

app = typer.Typer(
    name="kme-dist",
    help="Kernel embeddings of conditional distributions, learned from tables.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Newer releases of typer contain their own copy of click; the base class is found through its child.
ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception: only the outermost frame may catch it."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kme-dist {metadata.version('kme-dist')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file, see `kme-dist config-schema`.")],
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    fresh: Fresh = False,
    performance: Performance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Learn, evaluate and write the run folder with report.html, as configured."""
    if _has_section(config, "pendulum"):
        if performance is not None or scheduler is not None:
            option = "--scheduler" if performance is None else "--performance-report"
            raise typer.BadParameter(f"{option} requires a cluster, which the pendulum example does not use.")
        pendulum(config, overrides, as_json, quiet)
        return
    result = _run_stage("run", config, overrides, scheduler, quiet, fresh=fresh, performance=performance)
    if as_json:
        print_json(result)
        return
    if result["reused"]:
        stderr_printer(quiet)("nothing has changed: this is the earlier result (--fresh recomputes it)")
    for start in result["starts"]:
        print(
            f"{start['name']}: test accuracy {100 * start['accuracy_before']:.2f} % before learning, "
            f"{100 * start['accuracy']:.2f} % after"
        )
    print(
        f"test accuracy {100 * result['accuracy']:.2f} %  log loss {result['log_loss']:.4f}  "
        f"calibration error {100 * result['calibration_error']:.1f} %  "
        f"({result['test_rows']} test rows, {result['steps']} steps, {result['seconds']:.1f} s)"
    )
    print(f"report: {result['report']}")


@app.command()
def learn(
    config: DatasetConfig,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Restart instead of resuming from a checkpoint.")] = False,
    performance: Performance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Learn kernel and regularisation from a data set on a cluster, or resume an interrupted run."""
    result = _run_stage("learn", config, overrides, scheduler, quiet, fresh=fresh, performance=performance)
    print_result(
        result,
        as_json,
        f"{result['steps']} steps, {result['steps_now']} of them now in {result['seconds']:.1f} s; "
        f"regularisation {result['regularization']:.4g}",
        f"learned: {result['learned']}",
    )


@app.command()
def fit(
    config: DatasetConfig,
    update: Annotated[
        bool,
        typer.Option("--update", help="Add the chunks that the fitted model has not seen, without reading others."),
    ] = False,
    remove: Annotated[
        str | None, typer.Option(metavar="DATA", help="With --update: remove the chunks of this data set.")
    ] = None,
    merge: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="With --update: merge the model of another run folder.")
    ] = None,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    fresh: Fresh = False,
    performance: Performance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Fit the embedding on all rows on a cluster, with the kernel that `learn` has written to the run folder."""
    changes = {"update": update, "remove": remove, "merge": merge}
    result = _run_stage("fit", config, overrides, scheduler, quiet, fresh=fresh, performance=performance, **changes)
    loss = "" if result["loss"] is None else f", leave-one-out log loss {result['loss']:.4f}"
    print_result(
        result,
        as_json,
        f"{result['solver']} ({result['reason']}) on {result['rows']} rows in {result['seconds']:.1f} s: "
        f"regularisation {result['regularization']:.4g}{loss}, residual {result['residual']:.1e}, "
        f"{result['iterations']} iterations",
        f"model: {result['model']}",
    )


def _run_stage(
    stage: str, config: Path, overrides: list[str] | None, scheduler: str | None, quiet: bool, **options: Any
) -> dict[str, Any]:
    """Run the pipeline `stage` with its progress on stderr; `options` are those of the pipeline."""
    say, changes = stderr_printer(quiet), overrides or []
    settings = load_config(config, [*changes, *cluster_overrides(scheduler)])
    typed = ["kme-dist", stage, str(config), *(f"--set={change}" for change in changes)]
    with load("pipelines.progress").StepProgress(sys.stderr, quiet=quiet) as progress:
        listener = load("pipelines.folder").Listener(start=progress.rename, step=progress, say=say)
        with performance_notice(options["performance"], say):
            result: dict[str, Any] = load(f"pipelines.{stage}").run(
                settings, name=config.stem, listener=listener, command=shlex.join(typed), **options
            )
    return result


@app.command()
def plan(
    config: DatasetConfig,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what `learn` would do: batches, memory per worker, time; refuse what cannot fit."""
    facts = load("pipelines.plan").run(load_config(config, [*(overrides or []), *cluster_overrides(scheduler)]))
    _print_facts(facts, as_json)


@app.command()
def ingest(
    source: Annotated[str, typer.Argument(help="csv/tsv, Parquet (file or folder), npy, npz, LIBSVM, IDX or Zarr.")],
    dest: Annotated[str, typer.Argument(help="Path or address of the data set, e.g. table.zarr.")],
    label: Annotated[str | None, typer.Option(help="Column of classes or targets, by name or index.")] = None,
    features: Annotated[str | None, typer.Option(help="Comma-separated columns to read; default: all.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Comma-separated columns to skip.")] = None,
    task: Annotated[str, typer.Option(help="auto, classification or regression.")] = "auto",
    one_hot: Annotated[str | None, typer.Option(help="Text columns to encode one-hot; default: all.")] = None,
    ordinal: Annotated[str | None, typer.Option(help="Text columns to encode as 0, 1, 2, ...")] = None,
    missing: Annotated[
        str, typer.Option(help="Missing values: error, drop, mean, median, or a number to fill in.")
    ] = "error",
    dtype: Annotated[str, typer.Option(help="auto, float32, float64 or uint8.")] = "auto",
    shuffle: Annotated[int | None, typer.Option(metavar="SEED", help="Shuffle the rows.")] = None,
    split: Annotated[
        str | None, typer.Option(help="train=0.8,test=0.2, or row ranges train=0:800,test=800:1000.")
    ] = None,
    split_key: Annotated[str | None, typer.Option(help="Column whose equal values stay in one split.")] = None,
    split_column: Annotated[str | None, typer.Option(help="Column with the split of each row.")] = None,
    stratify: Annotated[
        bool, typer.Option("--stratify", help="Keep the class proportions equal in all splits.")
    ] = False,
    format: Annotated[str | None, typer.Option(help="File format, if the name does not show it.")] = None,
    delimiter: Annotated[str | None, typer.Option(help="Field delimiter of a csv file.")] = None,
    header: Annotated[
        bool | None, typer.Option("--header/--no-header", help="Whether a csv file has a header.")
    ] = None,
    encoding: Annotated[str, typer.Option(help="Encoding of a csv file.")] = "utf-8",
    compression: Annotated[str, typer.Option(help="auto, zstd or none.")] = "auto",
    memory: Annotated[str, typer.Option(help="Memory limit for buffered rows, e.g. 512MiB.")] = "512MiB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing data set.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Append the rows to an existing data set.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Convert a table of any size to a data set: partitioned, validated, with statistics."""
    data = load("pipelines.ingest").run(
        source,
        dest,
        label=label,
        features=split_names(features),
        exclude=split_names(exclude) or (),
        task=task,
        one_hot=split_names(one_hot),
        ordinal=split_names(ordinal) or (),
        missing=missing,
        dtype=dtype,
        shuffle=shuffle,
        split=split,
        split_key=split_key,
        split_column=split_column,
        stratify=stratify,
        format=format,
        delimiter=delimiter,
        header=header,
        encoding=encoding,
        compression=compression,
        memory=memory,
        overwrite=overwrite,
        add=append,
        quiet=quiet,
    )
    if as_json:
        print_json(load("pipelines.describe").describe(dest))
    else:
        print(data)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A data set, model, checkpoint, predictions or run folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every stored byte.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Describe a data set, a model or a run."""
    stored = load("pipelines.describe")
    if "://" not in path and (Path(path) / "run.json").is_file():
        facts = load("pipelines.folder").describe_run(Path(path))
        if verify and (Path(path) / "model.zarr").exists():
            stored.describe(Path(path) / "model.zarr", verify=True)
    else:
        facts = stored.describe(path, verify=verify)
    if as_json:
        print_json(facts)
    elif facts["format"] == "kme-dist/dataset":
        stored.render(facts)
    else:
        steps = facts.pop("history", None)
        print_tree(facts if steps is None else {**facts, "steps": len(steps)})


@app.command()
def doctor(
    scheduler: Scheduler = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check this installation: versions, BLAS, threads, memory, GPUs, write access, cluster."""
    report = load("pipelines.doctor").examine(scheduler=scheduler, insecure=insecure)
    if as_json or not quiet:
        _print_facts(report, as_json)
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    if report["problems"]:
        raise typer.Exit(2)
    if not as_json:
        stderr_printer(quiet)("no problems found")


@app.command()
def smoke(
    config: Annotated[Path | None, typer.Argument(help="YAML file whose section `cluster` is tested.")] = None,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    folder: Annotated[
        str | None, typer.Option(help="Folder that all workers can reach; default: a temporary folder.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Test a cluster end to end: store, learn, fit and predict a tiny table, and check the result."""
    if config is not None:
        settings = load_config(config, [*(overrides or []), *cluster_overrides(scheduler)]).cluster
    elif overrides:
        raise typer.BadParameter("--set overrides a key of CONFIG, and no CONFIG is given.")
    else:
        settings = ClusterConfig() if scheduler is None else ClusterConfig(kind="address", address=scheduler)
    facts = load("pipelines.smoke").run(settings, folder)
    if as_json:
        print_json(facts)
    elif not quiet:
        print(
            f"passed: {facts['workers']} workers, {facts['steps']} steps identical to a single process, "
            f"test accuracy {100 * facts['accuracy']:.0f} % ({facts['seconds']:.1f} s)"
        )


job_commands.add_commands(app)
predict_commands.add_commands(app)


@app.command()
def pendulum(
    config: Annotated[Path, typer.Argument(help="YAML file with a section `pendulum`, see configs/pendulum.yaml.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Example: swing a pendulum up by kernel policy iteration, with dense and sparse embeddings."""
    example = load("pipelines.pendulum")
    result = example.run(example.load(config, overrides or []), name=config.stem, say=stderr_printer(quiet))
    print_result(result, as_json, example.summary(result), f"report: {result['report']}")


def _has_section(config: Path, name: str) -> bool:
    """Whether a config has this section of an example; mistakes in the file are reported later."""
    try:
        tree = parse_yaml(config.read_text(encoding="utf-8"), str(config))
    except (KMEError, OSError, UnicodeDecodeError):
        return False
    return isinstance(tree, dict) and name in tree


@app.command("config-schema")
def config_schema(as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Print the JSON Schema of the config file, for editors and validators."""
    print_json(json_schema())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script; always raises SystemExit."""
    code = execute(list(sys.argv[1:] if argv is None else argv))
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has exited (`| head`); Python's own last flush must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    command: Any = typer.main.get_command(app)
    try:
        with _sigterm_raises():
            code = command.main(args=arguments, prog_name="kme-dist", standalone_mode=False)
        if code == 130:  # how newer typer reports Ctrl-C
            return _interrupted(arguments, 130)
        return code if isinstance(code, int) else 0
    except ClickException as error:
        known = bool(arguments) and arguments[0] in command.commands
        hint = f"kme-dist {arguments[0]} --help" if known else "kme-dist --help"
        return _fail(arguments, f"{error.format_message()} See `{hint}`.", 2)
    except KMEError as error:
        return _fail(arguments, str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(arguments, 130)
    except Terminated:
        return _interrupted(arguments, 143)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = f" ({error.filename})" if error.filename else ""
            return _fail(arguments, f"the disk is full{place}; free some space and run again", 75)
        traceback.print_exc()
        return _fail(arguments, f"{type(error).__name__}: {error} (a bug in kme-dist)", 1)


def _fail(arguments: list[str], message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    if "--json" in arguments:
        print_json({"error": line, "exit_code": code})
    return code


def _interrupted(arguments: list[str], code: int) -> int:
    again = shlex.join(["kme-dist", *arguments])
    return _fail(arguments, f"interrupted, finished work is saved; resume with: {again}", code)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that run records and leases are closed properly."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, before)


def _print_facts(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        print_tree(facts)
