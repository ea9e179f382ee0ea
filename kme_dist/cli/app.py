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
corrupt or missing, 75 try again, 130 and 143 interrupted. A mistake of the user gets one line.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Any, NoReturn

import typer

from kme_dist.cli import jobs as cli_jobs
from kme_dist.cli import predict as cli_predict
from kme_dist.config import json_schema, load_config, parse_yaml
from kme_dist.errors import KMEError

app = typer.Typer(
    name="kme-dist",
    help="Kernel embeddings of conditional distributions, learned from tables.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

# typer carries its own copy of click in newer releases; the base class is found through its child.
ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no messages, errors only.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the config.")
]
Scheduler = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Use the Dask cluster that runs there.")]
Performance = cli_predict.Performance


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception: nothing but the outermost frame may swallow it."""


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
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute anew what an earlier run has finished.")] = False,
    performance: Performance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Learn, evaluate and write the run folder with report.html, as the config says."""
    if _has_section(config, "pendulum"):
        if performance is not None:
            raise typer.BadParameter("--performance-report is of a cluster, and the pendulum uses none.")
        pendulum(config, overrides, as_json, quiet)
        return
    settings = load_config(config, overrides or [])
    say = _stderr_printer(quiet)
    job, typed = _pipeline("run"), ["kme-dist", "run", str(config), *(f"--set={change}" for change in overrides or [])]
    with _pipeline("progress").StepProgress(sys.stderr, quiet=quiet) as progress:
        listener = job.Listener(start=progress.rename, step=progress, say=say)
        with cli_predict.reporting(performance, say):
            result = job.run(
                settings,
                name=config.stem,
                fresh=fresh,
                listener=listener,
                command=shlex.join(typed),
                performance=performance,
            )
    if as_json:
        _print_json(result)
        return
    if result["reused"]:
        say("nothing has changed: this is the finished result (--fresh computes it anew)")
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
    config: Annotated[Path, typer.Argument(help="YAML file whose data.source is a data set.")],
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on from a checkpoint.")] = False,
    performance: Performance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Learn kernel and regularisation from a data set over a cluster, or resume an interrupted run."""
    settings = load_config(config, [*(overrides or []), *_at(scheduler)])
    job, typed = _pipeline("learn"), ["kme-dist", "learn", str(config), *(f"--set={c}" for c in overrides or [])]
    with _pipeline("progress").StepProgress(sys.stderr, quiet=quiet) as progress:
        listener = _pipeline("folder").Listener(start=progress.rename, step=progress, say=_stderr_printer(quiet))
        with cli_predict.reporting(performance, _stderr_printer(quiet)):
            result = job.run(
                settings,
                name=config.stem,
                fresh=fresh,
                listener=listener,
                command=shlex.join(typed),
                performance=performance,
            )
    if as_json:
        _print_json(result)
        return
    print(
        f"{result['steps']} steps, {result['steps_now']} of them now in {result['seconds']:.1f} s; "
        f"regularisation {result['regularization']:.4g}"
    )
    print(f"learned: {result['learned']}")


@app.command()
def fit(
    config: Annotated[Path, typer.Argument(help="YAML file whose data.source is a data set.")],
    update: Annotated[
        bool, typer.Option("--update", help="Add the chunks that a fitted model has not seen; old rows are not read.")
    ] = False,
    remove: Annotated[
        str | None, typer.Option(metavar="DATA", help="With --update: take the chunks of this data set out.")
    ] = None,
    merge: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="With --update: take in the model of another run folder.")
    ] = None,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Fit anew although nothing has changed.")] = False,
    performance: Performance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Solve for the embedding on all rows over a cluster, with the kernel that `learn` has left in the run folder."""
    settings = load_config(config, [*(overrides or []), *_at(scheduler)])
    job, typed = _pipeline("fit"), ["kme-dist", "fit", str(config), *(f"--set={c}" for c in overrides or [])]
    with cli_predict.reporting(performance, _stderr_printer(quiet)):
        result = job.run(
            settings,
            name=config.stem,
            update=update,
            remove=remove,
            merge=merge,
            fresh=fresh,
            listener=_pipeline("folder").Listener(say=_stderr_printer(quiet)),
            command=shlex.join(typed),
            performance=performance,
        )
    if as_json:
        _print_json(result)
        return
    loss = "" if result["loss"] is None else f", log loss of rows left out {result['loss']:.4f}"
    print(
        f"{result['solver']} ({result['reason']}) on {result['rows']} rows in {result['seconds']:.1f} s: "
        f"regularisation {result['regularization']:.4g}{loss}, residual {result['residual']:.1e}, "
        f"{result['iterations']} iterations"
    )
    print(f"model: {result['model']}")


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="YAML file whose data.source is a data set.")],
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say what `learn` would do: batches, memory of a worker, time; refuse what cannot fit."""
    facts = _pipeline("plan").run(load_config(config, [*(overrides or []), *_at(scheduler)]))
    if as_json:
        _print_json(facts)
    else:
        _print_tree(facts)


def _at(scheduler: str | None) -> list[str]:
    return [] if scheduler is None else ["cluster.kind=address", f"cluster.address={json.dumps(scheduler)}"]


@app.command()
def ingest(
    source: Annotated[str, typer.Argument(help="csv/tsv, Parquet (file or folder), npy, npz, LIBSVM, IDX or Zarr.")],
    dest: Annotated[str, typer.Argument(help="Folder or address of the data set, e.g. table.zarr.")],
    label: Annotated[str | None, typer.Option(help="Column of the classes or targets, by name or position.")] = None,
    like: Annotated[str | None, typer.Option(metavar="DATA", help="Data set whose encoding is reused.")] = None,
    features: Annotated[str | None, typer.Option(help="Columns to take, separated by commas; all when absent.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Columns to leave out, separated by commas.")] = None,
    task: Annotated[str, typer.Option(help="auto, classification or regression.")] = "auto",
    one_hot: Annotated[
        str | None, typer.Option(help="Text columns to encode one-hot; all of them when absent.")
    ] = None,
    ordinal: Annotated[str | None, typer.Option(help="Text columns to encode as 0, 1, 2, ...")] = None,
    missing: Annotated[str, typer.Option(help="error, drop, mean, median, or a number to put there.")] = "error",
    dtype: Annotated[str, typer.Option(help="auto, float32, float64 or uint8.")] = "auto",
    shuffle: Annotated[int | None, typer.Option(metavar="SEED", help="Store the rows in a random order.")] = None,
    split: Annotated[
        str | None, typer.Option(help="train=0.8,test=0.2, or row ranges train=0:800,test=800:1000.")
    ] = None,
    split_key: Annotated[str | None, typer.Option(help="Column whose equal values stay together.")] = None,
    split_column: Annotated[str | None, typer.Option(help="Column that names the part of each row.")] = None,
    stratify: Annotated[bool, typer.Option("--stratify", help="Keep the class shares alike in all parts.")] = False,
    format: Annotated[str | None, typer.Option(help="Kind of file, where its name does not tell.")] = None,
    delimiter: Annotated[str | None, typer.Option(help="Field delimiter of a csv file.")] = None,
    header: Annotated[bool | None, typer.Option("--header/--no-header", help="Whether a csv file has one.")] = None,
    encoding: Annotated[str, typer.Option(help="Encoding of a csv file.")] = "utf-8",
    compression: Annotated[str, typer.Option(help="auto, zstd or none.")] = "auto",
    memory: Annotated[str, typer.Option(help="Bound on the rows held at a time, e.g. 512MiB.")] = "512MiB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a data set that is there.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Add the rows to the data set that is there.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Turn a table of any size into a data set: partitioned, checked, with statistics."""
    data = _pipeline("ingest").run(
        source,
        dest,
        label=label,
        like=like,
        features=_names(features),
        exclude=_names(exclude) or (),
        task=task,
        one_hot=_names(one_hot),
        ordinal=_names(ordinal) or (),
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
        _print_json(_pipeline("describe").describe(dest))
    else:
        print(data)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A data set, a model or a run folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every stored byte.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say what lies at a path: a data set, a model or a run."""
    if "://" not in path and (Path(path) / "run.json").is_file():
        facts = _pipeline("folder").describe_run(Path(path))
        if verify and (Path(path) / "model.zarr").exists():
            _pipeline("describe").describe(Path(path) / "model.zarr", verify=True)
    else:
        facts = _pipeline("describe").describe(path, verify=verify)
    if as_json:
        _print_json(facts)
    elif facts["format"] == "kme-dist/dataset":
        _pipeline("describe").render(facts)
    else:
        steps = facts.pop("history", None)
        _print_tree(facts if steps is None else {**facts, "steps": len(steps)})


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


@app.command()
def doctor(
    scheduler: Scheduler = None,
    insecure: Annotated[bool, typer.Option("--allow-insecure", help="Reach another machine without TLS.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Versions, BLAS and threads, cores and memory, GPUs, write access, a cluster: is all well here?"""
    report = _pipeline("doctor").examine(scheduler=scheduler, insecure=insecure)
    if as_json:
        _print_json(report)
    elif not quiet:
        _print_tree(report)
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    if report["problems"]:
        raise typer.Exit(2)
    if not as_json:
        _stderr_printer(quiet)("no problem found")


@app.command()
def smoke(
    config: Annotated[Path | None, typer.Argument(help="YAML file whose section `cluster` is to be tried.")] = None,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    folder: Annotated[
        str | None, typer.Option(help="Place that this process and all workers can reach; a scratch folder if absent.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Store, learn, fit and predict a tiny table on a cluster and check the result: does all of it work here?"""
    from kme_dist.config import ClusterConfig

    if config is not None:
        settings = load_config(config, [*(overrides or []), *_at(scheduler)]).cluster
    elif overrides:
        raise typer.BadParameter("--set changes a key of CONFIG, and none is given.")
    else:
        settings = ClusterConfig() if scheduler is None else ClusterConfig(kind="address", address=scheduler)
    facts = _pipeline("smoke").run(settings, folder)
    if as_json:
        _print_json(facts)
    elif not quiet:
        print(
            f"all is well: {facts['workers']} workers, {facts['steps']} steps as in a single process, "
            f"{100 * facts['accuracy']:.0f} % of the unseen rows told right ({facts['seconds']:.1f} s)"
        )


cli_jobs.add_commands(app)
cli_predict.add_commands(app)


@app.command()
def pendulum(
    config: Annotated[Path, typer.Argument(help="YAML file with a section `pendulum`, see configs/pendulum.yaml.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Example: swing a pendulum up by kernel policy iteration, with dense and sparse embeddings."""
    job = _pipeline("pendulum")
    result = job.run(job.load(config, overrides or []), name=config.stem, say=_stderr_printer(quiet))
    if as_json:
        _print_json(result)
        return
    print(job.summary(result))
    print(f"report: {result['report']}")


def _has_section(config: Path, name: str) -> bool:
    """Whether a config is one of the examples that have a section of their own; what is wrong with it is said later."""
    try:
        tree = parse_yaml(config.read_text(encoding="utf-8"), str(config))
    except (KMEError, OSError, UnicodeDecodeError):
        return False
    return isinstance(tree, dict) and name in tree


@app.command("config-schema")
def config_schema(as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Print the JSON Schema of the config file, for editors and checks."""
    _print_json(json_schema())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script; always leaves through SystemExit."""
    code = execute(list(sys.argv[1:] if argv is None else argv))
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone (`| head`); Python's own last flush must not meet it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    command: Any = typer.main.get_command(app)
    try:
        with _sigterm_raises():
            code = command.main(args=arguments, prog_name="kme-dist", standalone_mode=False)
        if code == 130:  # what newer typer makes of Ctrl-C
            return _interrupted(arguments, 130)
        return code if isinstance(code, int) else 0
    except ClickException as error:
        hint = f"kme-dist {arguments[0]} --help" if _is_command(arguments) else "kme-dist --help"
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
        return _fail(arguments, f"{type(error).__name__}: {error} (a bug of kme-dist)", 1)


def _fail(arguments: list[str], message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    if "--json" in arguments:
        _print_json({"error": line, "exit_code": code})
    return code


def _interrupted(arguments: list[str], code: int) -> int:
    again = shlex.join(["kme-dist", *arguments])
    return _fail(arguments, f"interrupted, nothing half-done is kept; run it again with: {again}", code)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that run records and leases are left in order."""
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


def _is_command(arguments: list[str]) -> bool:
    return bool(arguments) and arguments[0] in {
        "run",
        "learn",
        "plan",
        "cluster",
        "ingest",
        "inspect",
        "doctor",
        "pendulum",
        "config-schema",
        "fit",
        "predict",
        "evaluate",
        "submit",
        "jobs",
        "schedule",
        "certs",
    }


def _pipeline(name: str) -> ModuleType:
    """A job, imported when it is asked for: `kme-dist --help` need not load the numerics."""
    return importlib.import_module(f"kme_dist.pipelines.{name}")


def _stderr_printer(quiet: bool) -> Callable[[str], None]:
    """Messages to a person, on stderr."""

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def _print_tree(value: Any, indent: int = 0) -> None:
    """Nested facts as indented `name  value` lines."""
    width = max((len(str(key)) for key in value), default=0)
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            print(f"{' ' * indent}{key}")
            _print_tree(inner, indent + 2)
        else:
            print(f"{' ' * indent}{key!s:{width}}  {_one_line(str(key), inner)}")


def _one_line(key: str, value: Any) -> str:
    text = _in_words(key, value)
    return text if len(text) <= 160 else text[:157] + "..."


def _in_words(key: str, value: Any) -> str:
    if key.endswith("bytes") and isinstance(value, int):
        return _bytes(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "; ".join(_in_words(key, item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(name, inner)}" for name, inner in value.items()) or "none"
    return str(value)


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
