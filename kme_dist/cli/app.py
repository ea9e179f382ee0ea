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
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from kme_dist.cli import drivers as cluster_commands
from kme_dist.cli import jobs as job_commands
from kme_dist.cli import predict as predict_commands
from kme_dist.cli import reproduce as reproduce_commands
from kme_dist.cli import schedule as schedule_commands
from kme_dist.cli.options import (
    ConfigOptions,
    Fresh,
    Insecure,
    Output,
    Overrides,
    Scheduler,
    StageOptions,
    TableConfig,
    Tls,
    covered,
    expand_options,
    load,
    print_json,
    print_tree,
    split_names,
)
from kme_dist.config import ClusterConfig, json_schema, parse_yaml
from kme_dist.errors import AssumptionWarning, ConfigError, KMEError, RetryError, counted, plural
from kme_dist.ops.certs import tls_files

app = typer.Typer(
    name="kme-dist",
    help="Kernel embeddings of conditional distributions, learned from tables.",
    pretty_exceptions_enable=False,
)

_MAKE_SPACE = "free some space and run again"

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
@expand_options
def run(
    config: Annotated[Path, typer.Argument(help="YAML file, see `kme-dist config-schema`.")],
    options: StageOptions,
    output: Output,
    fresh: Fresh = False,
) -> None:
    """Learn, evaluate and write the run folder with report.html, as configured."""
    if _has_section(config, "pendulum"):
        if options.performance is not None or options.scheduler is not None:
            option = "--scheduler" if options.performance is None else "--performance-report"
            raise typer.BadParameter(f"{option} requires a cluster, which the pendulum example does not use.")
        _run_pendulum(config, options.overrides, output)
        return
    result = _run_stage("run", config, options, output, fresh=fresh)
    _show_run(result, output)
    if (named := result.get("data_predictions")) is not None:
        predict_commands.exit_if_incomplete(named)


def _show_run(result: dict[str, Any], output: Output) -> None:
    if output.as_json:
        print_json(result)
        return
    if result["reused"]:
        output.say("nothing has changed: this is the earlier result (--fresh recomputes it)")
    for start in result["starts"]:
        print(
            f"{start['name']}: test accuracy {100 * start['accuracy_before']:.2f} % before learning, "
            f"{100 * start['accuracy']:.2f} % after"
        )
    if "rmse" in result:
        figures = f"test RMSE {result['rmse']:.5g}  MAE {result['mae']:.5g}  R2 {result['r2']:.3f}  "
        figures += f"{covered(result)}  "
    else:
        figures = f"test accuracy {100 * result['accuracy']:.2f} %  log loss {result['log_loss']:.4f}  "
        figures += f"calibration error {100 * result['calibration_error']:.1f} %  "
    print(
        f"{figures}({result['test_rows']} test {plural(result['test_rows'], 'row')}, "
        f"{result['steps']} {plural(result['steps'], 'step')}, {result['seconds']:.1f} s)"
    )
    print(f"report: {result['report']}")
    if (named := result.get("data_predictions")) is not None:
        print(f"{counted(named['rows'], 'row', ',')} of {named['data']} ({named['computed_rows']:,} computed)")
        print(f"predictions: {named['predictions']}")


@app.command()
@expand_options
def learn(
    config: TableConfig,
    options: StageOptions,
    output: Output,
    fresh: Annotated[bool, typer.Option("--fresh", help="Restart instead of resuming from a checkpoint.")] = False,
) -> None:
    """Learn kernel and regularisation on a cluster, or resume an interrupted run."""
    result = _run_stage("learn", config, options, output, fresh=fresh)
    output.result(
        result,
        f"{result['steps']} {plural(result['steps'], 'step')}, {result['steps_now']} of them now "
        f"in {result['seconds']:.1f} s; regularisation {result['regularization']:.4g}",
        f"learned: {result['learned']}",
    )


@dataclass(frozen=True)
class UpdateOptions:
    """How a fitted model is changed without reading all rows."""

    update: Annotated[
        bool,
        typer.Option("--update", help="Add the chunks that the fitted model has not seen, without reading others."),
    ] = False
    remove: Annotated[
        str | None, typer.Option(metavar="DATA", help="With --update: remove the chunks of this data set.")
    ] = None
    merge: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="With --update: merge the model of another run folder.")
    ] = None


@app.command()
@expand_options
def fit(
    config: TableConfig, update: UpdateOptions, options: StageOptions, output: Output, fresh: Fresh = False
) -> None:
    """Fit the embedding on all rows on a cluster, with the kernel that `learn` has written to the run folder."""
    result = _run_stage("fit", config, options, output, fresh=fresh, **asdict(update))
    rows = "held-out" if result["solver"] == "falkon" else "leave-one-out"
    facts = [f"regularisation {result['regularization']:.4g}"]
    if result["loss"] is not None:
        facts.append(f"{rows} {result.get('loss_name', 'log loss')} {result['loss']:.4f}")
    if "residual" in result:  # of a solve by iterations
        facts.append(f"residual {result['residual']:.1e}")
    if "iterations" in result:
        facts.append(f"{result['iterations']} {plural(result['iterations'], 'iteration')}")
    output.result(
        result,
        f"{result['solver']} ({result['reason']}) on {result['rows']} {plural(result['rows'], 'row')} "
        f"in {result['seconds']:.1f} s: {', '.join(facts)}",
        f"model: {result['model']}",
    )


def _run_stage(stage: str, config: Path, options: StageOptions, output: Output, **settings: Any) -> dict[str, Any]:
    """Run the pipeline `stage` with its progress on stderr; `settings` are those of the pipeline."""
    typed = ["kme-dist", stage, str(config), *(f"--set={change}" for change in options.overrides or [])]
    wanted = options.load(config)
    with (
        load("pipelines.progress").RunProgress(sys.stderr, quiet=output.quiet) as progress,
        options.performance_notice(progress.say),
    ):
        result: dict[str, Any] = load(f"pipelines.{stage}").run(
            wanted,
            name=config.stem,
            listener=progress.listener,
            command=shlex.join(typed),
            performance=options.performance,
            **settings,
        )
    return result


@dataclass(frozen=True)
class ScenarioOptions:
    """Rows and workers to plan for, which need not exist."""

    workers: Annotated[int | None, typer.Option(help="Number of workers; default: that of the config.")] = None
    rows: Annotated[str | None, typer.Option(help="Number of rows, e.g. 1e9; default: those of the data set.")] = None
    features: Annotated[int | None, typer.Option(help="Features of a row; without a data set 50.")] = None
    classes: Annotated[int | None, typer.Option(help="Number of classes; without a data set 10.")] = None
    machine: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file of speeds; default: measured here.")
    ] = None

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "rows": None if self.rows is None else _count("--rows", self.rows)}


def _count(option: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < 2**63 or value != int(value):
        raise ConfigError(f"{option} {text}: must be an integer >= 1, such as 1000000 or 1e9")
    return int(value)


@app.command()
@expand_options
def plan(
    scenario: ScenarioOptions,
    options: ConfigOptions,
    output: Output,
    config: Annotated[Path | None, typer.Argument(help="YAML file; not needed with --measure.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Print the speeds of this machine as JSON.")] = False,
) -> None:
    """Show what `learn` would do, and what learn, fit and predict cost on any number of workers and rows."""
    if measure:
        print_json(asdict(load("pipelines.scaling").measured_machine(cluster=True)))
        return
    if config is None:
        raise ConfigError("a config is needed, or --measure: kme-dist plan CONFIG [--workers 100] [--rows 1e9]")
    given = load("pipelines.scaling").Scenario(**scenario.settings())
    facts = load("pipelines.plan").run(options.load(config), given)
    if output.as_json:
        print_json(facts)
        return
    print_tree({key: value for key, value in facts.items() if key != "stages"})
    for line in load("pipelines.scaling").table(facts["stages"]):
        print(line)


@dataclass(frozen=True)
class IngestOptions:
    """Which columns and rows of a source to store, and how."""

    label: Annotated[str | None, typer.Option(help="Column of classes or targets, by name or index.")] = None
    weight: Annotated[str | None, typer.Option(help="Column of the weights of rows, by name or index.")] = None
    like: Annotated[str | None, typer.Option(metavar="DATA", help="Data set whose encoding is reused.")] = None
    unseen: Annotated[
        str | None, typer.Option(help="With --like: categories that DATA does not have: error (default) or zeros.")
    ] = None
    features: Annotated[str | None, typer.Option(help="Comma-separated columns to read; default: all.")] = None
    exclude: Annotated[str | None, typer.Option(help="Comma-separated columns to skip.")] = None
    task: Annotated[str, typer.Option(help="auto, classification or regression.")] = "auto"
    one_hot: Annotated[str | None, typer.Option(help="Text columns to encode one-hot; default: all.")] = None
    ordinal: Annotated[str | None, typer.Option(help="Text columns to encode as 0, 1, 2, ...")] = None
    categories: Annotated[
        str | None, typer.Option(help="Columns that are categories, whatever their values look like, e.g. 007.")
    ] = None
    missing: Annotated[
        str,
        typer.Option(
            help="Missing values: error, drop, mean, median, indicator or a number; auto: indicator for tables."
        ),
    ] = "auto"
    dtype: Annotated[str, typer.Option(help="auto, float32, float64 or uint8.")] = "auto"
    shuffle: Annotated[int | None, typer.Option(metavar="SEED", help="Shuffle the rows.")] = None
    split: Annotated[str | None, typer.Option(help="train=0.8,test=0.2, or rows train=0:800,test=800:1000.")] = None
    split_key: Annotated[str | None, typer.Option(help="Column whose equal values stay in one split.")] = None
    split_column: Annotated[str | None, typer.Option(help="Column with the split of each row.")] = None
    stratify: Annotated[bool, typer.Option("--stratify", help="Keep class proportions equal in all splits.")] = False
    format: Annotated[str | None, typer.Option(help="File format, if the name does not show it.")] = None
    delimiter: Annotated[str | None, typer.Option(help="Field delimiter of a csv file.")] = None
    header: Annotated[bool | None, typer.Option("--header/--no-header", help="Whether a csv file has a header.")] = None
    encoding: Annotated[str, typer.Option(help="Encoding of a csv file.")] = "utf-8"
    decimal: Annotated[str, typer.Option(help="Decimal sign of numbers that are text: . or ,")] = "."
    thousands: Annotated[str, typer.Option(help="Separator between thousands, e.g. ,")] = ""
    percent: Annotated[bool, typer.Option("--percent", help="Texts such as 10% are numbers, 0.1.")] = False
    strip: Annotated[bool | None, typer.Option("--strip/--no-strip", help="Whether to remove spaces around texts.")] = (
        None
    )
    compression: Annotated[str, typer.Option(help="auto, zstd or none.")] = "auto"
    memory: Annotated[str, typer.Option(help="Memory limit for buffered rows, e.g. 512MiB.")] = "512MiB"
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing data set.")] = False
    append: Annotated[bool, typer.Option("--append", help="Append the rows to an existing data set.")] = False
    again: Annotated[
        bool, typer.Option("--again", help="With --append: also rows that are those of the last append.")
    ] = False

    def settings(self) -> dict[str, Any]:
        """As the pipeline takes them."""
        names = {"features": split_names(self.features), "one_hot": split_names(self.one_hot)}
        names |= {key: split_names(getattr(self, key)) or [] for key in ("exclude", "ordinal", "categories")}
        given = {**asdict(self), **names, "add": self.append}
        del given["append"]
        return given


@app.command()
@expand_options
def ingest(
    source: Annotated[str, typer.Argument(help="csv/tsv, Parquet (file or folder), npy, npz, LIBSVM, IDX or Zarr.")],
    dest: Annotated[str, typer.Argument(help="Path or address of the data set, e.g. table.zarr.")],
    options: IngestOptions,
    output: Output,
) -> None:
    """Convert a table of any size to a data set: partitioned, validated, with statistics."""
    data = load("pipelines.ingest").run(source, dest, quiet=output.quiet, **options.settings())
    if output.as_json:
        print_json(load("pipelines.describe").describe(dest))
    else:
        print(data)


@app.command()
@expand_options
def inspect(
    path: Annotated[str, typer.Argument(help="A data set, model, checkpoint, predictions or run folder.")],
    output: Output,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every stored byte.")] = False,
) -> None:
    """Describe a data set, a model or a run."""
    stored = load("pipelines.describe")
    if "://" not in path and (Path(path) / "run.json").is_file():
        facts = load("pipelines.folder").describe_run(Path(path), verify=verify)
    else:
        facts = stored.describe(path, verify=verify)
    if output.as_json:
        print_json(facts)
    elif facts["format"] == "kme-dist/dataset":
        stored.render(facts)
    elif "model" in facts and facts["format"] != stored.PREDICTIONS_FORMAT:
        print_tree(stored.model_card(facts))
    else:
        history = facts.pop("history", None)
        if history is not None and "step" not in facts:  # a checkpoint has a step, and rarely a history
            facts["steps"] = len(history)
        print_tree(facts)


@app.command()
@expand_options
def doctor(output: Output, scheduler: Scheduler = None, tls: Tls = None, insecure: Insecure = False) -> None:
    """Check this installation: versions, BLAS, threads, memory, GPUs, write access, cluster. With --quiet only problems
    are printed."""
    report = load("pipelines.doctor").examine(
        scheduler=scheduler, tls=None if tls is None else tls_files(tls), insecure=insecure
    )
    if output.as_json or not output.quiet:
        _print_facts(report, output)
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    if report["exit_code"]:
        raise typer.Exit(report["exit_code"])
    if not output.as_json:
        output.say("no problems found")


@app.command()
@expand_options
def smoke(
    options: ConfigOptions,
    output: Output,
    config: Annotated[Path | None, typer.Argument(help="YAML file whose section `cluster` is tested.")] = None,
    folder: Annotated[
        str | None, typer.Option(help="Folder that all workers can reach; default: a temporary folder.")
    ] = None,
) -> None:
    """Test a cluster end to end: store, learn, fit and predict a tiny table, and check the result. With --quiet only
    problems are printed."""
    if config is not None:
        settings = options.load(config).cluster
    elif options.overrides:
        raise typer.BadParameter("--set overrides a key of CONFIG, and no CONFIG is given.")
    else:
        settings = ClusterConfig(**options.cluster_section())
    facts = load("pipelines.smoke").run(settings, folder)
    if output.as_json:
        print_json(facts)
    elif not output.quiet:
        print(
            f"passed: {facts['workers']} {plural(facts['workers'], 'worker')}, "
            f"{facts['steps']} {plural(facts['steps'], 'step')} identical to a single process, "
            f"test accuracy {100 * facts['accuracy']:.0f} % ({facts['seconds']:.1f} s)"
        )


cluster_commands.add_commands(app)
job_commands.add_commands(app)
schedule_commands.add_commands(app)
predict_commands.add_commands(app)
reproduce_commands.add_commands(app)


@app.command()
@expand_options
def pendulum(
    config: Annotated[Path, typer.Argument(help="YAML file with a section `pendulum`, see configs/pendulum.yaml.")],
    output: Output,
    overrides: Overrides = None,
) -> None:
    """Example: swing a pendulum up by kernel policy iteration, with dense and sparse embeddings."""
    _run_pendulum(config, overrides, output)


def _run_pendulum(config: Path, overrides: list[str] | None, output: Output) -> None:
    example = load("pipelines.pendulum")
    result = example.run(example.load(config, overrides or []), name=config.stem, say=output.say)
    output.result(result, example.summary(result), f"report: {result['report']}")


def _has_section(config: Path, name: str) -> bool:
    """Whether a config has this section of an example; mistakes in the file are reported later."""
    try:
        tree = parse_yaml(config.read_text(encoding="utf-8"), str(config))
    except (KMEError, OSError, UnicodeDecodeError):
        return False
    return isinstance(tree, dict) and name in tree


@app.command("config-schema")
@expand_options
def config_schema(output: Output) -> None:
    """Print the JSON Schema of the config file, for editors and validators."""
    print_json(json_schema())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script; always raises SystemExit."""
    sys.exit(_flushed(execute(list(sys.argv[1:] if argv is None else argv))))


def _flushed(code: int) -> int:
    """The exit code, after what was printed has left this process."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python's own last flush must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError) or code:  # the reader has exited (`| head`); or the error is printed
            return code
        print(f"error: the result cannot be written to stdout ({error.strerror}); {_MAKE_SPACE}", file=sys.stderr)
        return RetryError.exit_code
    return code


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    command: Any = typer.main.get_command(app)
    try:
        with _sigterm_raises(), _notes_on_stderr("--quiet" in arguments):
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
    except job_commands.JobCancelled as error:  # its result, JSON or not, is already printed
        print(f"error: {error}", file=sys.stderr)
        return 130
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(arguments, 130)
    except Terminated:
        return _interrupted(arguments, 143)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = f" ({error.filename})" if error.filename else ""
            return _fail(arguments, f"the disk is full{place}; {_MAKE_SPACE}", 75)
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS) and error.filename:
            return _fail(arguments, f"{error.filename}: {error.strerror}; choose another path, or change its owner", 2)
        traceback.print_exc()
        return _fail(arguments, f"{type(error).__name__}: {error} (a bug in kme-dist)", 1)


def _fail(arguments: list[str], message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    if "--json" in arguments:
        with contextlib.suppress(OSError):  # stdout may be what is full
            print_json({"error": line, "exit_code": code})
    return code


def _interrupted(arguments: list[str], code: int) -> int:
    again = shlex.join(["kme-dist", *arguments])
    return _fail(arguments, f"interrupted, finished work is saved; resume with: {again}", code)


@contextlib.contextmanager
def _notes_on_stderr(quiet: bool) -> Iterator[None]:
    """Show how a table was read as one line each, once, without the place in our code."""
    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", AssumptionWarning)
        plain = warnings.showwarning

        def show(message: Any, category: Any, *place: Any, **further: Any) -> None:
            if not issubclass(category, AssumptionWarning):
                plain(message, category, *place, **further)
            elif not quiet and str(message) not in said:
                said.add(str(message))
                print(f"note: {message}", file=sys.stderr)

        warnings.showwarning = show
        yield


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


def _print_facts(facts: dict[str, Any], output: Output) -> None:
    if output.as_json:
        print_json(facts)
    else:
        print_tree(facts)
