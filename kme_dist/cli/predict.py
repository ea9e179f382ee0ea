"""Commands of batch inference: predict and evaluate, from a config or without one.

kme-dist predict configs/covtype.yaml
kme-dist predict --model model.zarr --data rows.zarr --out scores.zarr --outputs label,entropy
kme-dist evaluate --predictions scores.zarr --data rows.zarr
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from kme_dist.config import ClusterConfig, Config, load_config, parse_config
from kme_dist.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no messages, errors only.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the config.")
]
Scheduler = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Use the Dask cluster that runs there.")]
Performance = Annotated[
    Path | None, typer.Option("--performance-report", metavar="FILE", help="Dask's report of the cluster, as HTML.")
]
OptionalConfig = Annotated[Path | None, typer.Argument(help="YAML file; or give --model, --data and --out.")]


def add_commands(app: typer.Typer) -> None:
    for command in (predict, evaluate):
        app.command()(command)


def predict(
    config: OptionalConfig = None,
    model: Annotated[str | None, typer.Option(help="Saved model.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set, or Parquet file or folder.")] = None,
    out: Annotated[str | None, typer.Option(help="Where the predictions go.")] = None,
    outputs: Annotated[
        str | None, typer.Option(help="label, probability, decision, entropy, rkhs_entropy, separated by commas.")
    ] = None,
    expectation: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="E[g(Y) | x] for the g in a YAML or JSON file.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of top classes.")] = None,
    format: Annotated[str | None, typer.Option(help="zarr or parquet.")] = None,
    split: Annotated[str | None, typer.Option(help="Part of the data set; all of it when absent.")] = None,
    like: Annotated[str | None, typer.Option(help="Data set whose columns Parquet is read by.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column of Parquet to carry through.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace predictions of another model or of data that changed.")
    ] = False,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Compute every chunk anew.")] = False,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    performance: Performance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict all rows of a data set, chunk by chunk, each exactly once; run it again to resume."""
    pipeline = _pipeline("predict")
    flags = {
        "model": model,
        "data": data,
        "out": out,
        "outputs": None if outputs is None else [name.strip() for name in outputs.split(",") if name.strip()],
        "expectations": _pairs(expectation),
        "top_k": top_k,
        "format": format,
        "split": split,
        "like": like,
        "id_column": id_column,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    cluster, settings = _settings(config, overrides, scheduler, given)
    if settings is not None and config is not None:
        request = pipeline.request_of(settings, config.stem)
    else:
        missing = [flag for flag in ("model", "data", "out") if flag not in given]
        if missing:
            raise ConfigError(f"--{missing[0]} is missing; give --model, --data and --out, or a config file")
        wanted = _alone(given, scheduler).predict
        request = pipeline.standalone_request(given["model"], given["data"], given["out"], wanted)
    listener = _pipeline("folder").Listener(say=_stderr_printer(quiet))
    with reporting(performance, _stderr_printer(quiet)):
        result = pipeline.run_request(
            request, cluster, fresh=from_scratch, overwrite=overwrite, listener=listener, performance=performance
        )
    if as_json:
        _print_json(result)
    else:
        print(
            f"{result['rows']:,} rows, {result['computed']} chunks computed, {result['skipped']} done before; "
            f"{result['seconds']:.1f} s, {result['rows_per_second']:,.0f} rows/s"
        )
        print(f"predictions: {result['predictions']}")
    for entry in result["quarantined"]:
        last = entry["first_row"] + entry["rows"] - 1
        print(
            f"skipped chunk {entry['chunk']} (quarantined; rows {entry['first_row']} to {last}): {entry['error']}",
            file=sys.stderr,
        )
    if result["quarantined"]:
        raise typer.Exit(pipeline.EXIT_QUARANTINED)


def evaluate(
    config: OptionalConfig = None,
    predictions: Annotated[str | None, typer.Option(help="Output of `kme-dist predict`.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set with the labels, the one that was predicted.")] = None,
    split: Annotated[str | None, typer.Option(help="Part of it; that of the predictions when absent.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for metrics.json and report.html.")] = None,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare predictions with labels: accuracy, calibration, confusion, risk against coverage; figures and a page."""
    from kme_dist.data.predictions import open_predictions

    pipeline = _pipeline("evaluate")
    cluster, settings = _settings(config, overrides, scheduler, {})
    if settings is not None and config is not None and predictions is None:
        result = pipeline.run(settings, name=config.stem)
    else:
        if predictions is None or data is None:
            raise ConfigError("--predictions and --data are needed, or a config file")
        folder = out or str(Path(predictions).with_name(f"{Path(predictions).stem}-evaluation"))
        with pipeline.executor_for(open_predictions(predictions), cluster) as executor:
            metrics = pipeline.evaluate(
                predictions, data, split=split, folder=folder, executor=executor, title=Path(predictions).stem
            )
        result = pipeline.summary_of(metrics, folder)
    if as_json:
        _print_json(result)
        return
    shown = [f"accuracy {100 * result['accuracy']:.2f} %", f"balanced {100 * result['balanced_accuracy']:.2f} %"]
    if "log_loss" in result:
        shown += [f"log loss {result['log_loss']:.4f}", f"calibration error {100 * result['calibration_error']:.1f} %"]
    print(f"{'  '.join(shown)}  ({result['rows']:,} rows)")
    print(f"report: {result['report']}")


@contextlib.contextmanager
def reporting(performance: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Say where the report of the block is, or that there was nothing to report."""

    def written() -> float | None:
        return performance.stat().st_mtime if performance is not None and performance.exists() else None

    before = written()
    yield
    if performance is not None:
        no_news = "no performance report: no cluster worked for this command"
        say(no_news if written() == before else f"performance report: {performance}")


def _settings(
    config: Path | None, overrides: list[str] | None, scheduler: str | None, flags: dict[str, Any]
) -> tuple[ClusterConfig, Config | None]:
    at = [] if scheduler is None else ["cluster.kind=address", f"cluster.address={json.dumps(scheduler)}"]
    if config is None:
        if overrides:
            raise ConfigError("--set changes a key of a config file, and none is given")
        return _alone({}, scheduler).cluster, None
    changes = [f"predict.{key}={json.dumps(value)}" for key, value in flags.items()]
    settings = load_config(config, [*(overrides or []), *changes, *at])
    return settings.cluster, settings


def _alone(flags: dict[str, Any], scheduler: str | None) -> Config:
    """A config made of flags, checked like one from a file."""
    cluster = {} if scheduler is None else {"kind": "address", "address": scheduler}
    return parse_config({"data": {"source": "none"}, "predict": flags, "cluster": cluster}, "command line")


def _pairs(given: list[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--expectation {text}: needs NAME=FILE")
        found[name] = path
    return found


def _pipeline(name: str) -> ModuleType:
    return importlib.import_module(f"kme_dist.pipelines.{name}")


def _stderr_printer(quiet: bool) -> Any:
    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
