"""Commands of batch inference: predict and evaluate, from a config or without one.

kme-dist predict configs/covtype.yaml
kme-dist predict --model model.zarr --data rows.zarr --out scores.zarr --outputs label,entropy
kme-dist evaluate --predictions scores.zarr --data rows.zarr
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kme_dist.cli.lazy import load
from kme_dist.cli.options import (
    AsJson,
    Overrides,
    Performance,
    Quiet,
    Scheduler,
    cluster_overrides,
    performance_notice,
    split_names,
    split_pairs,
)
from kme_dist.cli.output import print_result, stderr_printer
from kme_dist.config import ClusterConfig, Config, load_config, parse_config
from kme_dist.errors import ConfigError

OptionalConfig = Annotated[Path | None, typer.Argument(help="YAML file; or use --model, --data and --out.")]


def add_commands(app: typer.Typer) -> None:
    for command in (predict, evaluate):
        app.command()(command)


def predict(
    config: OptionalConfig = None,
    model: Annotated[str | None, typer.Option(help="Saved model, or a run folder.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set, or Parquet file or folder.")] = None,
    out: Annotated[str | None, typer.Option(help="Where to write the predictions.")] = None,
    outputs: Annotated[
        str | None, typer.Option(help="Comma-separated: label, probability, decision, entropy, rkhs_entropy.")
    ] = None,
    expectation: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="E[g(Y) | x] for the g in a YAML or JSON file.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of top classes.")] = None,
    format: Annotated[str | None, typer.Option(help="Output format: zarr or parquet.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data set; default: all rows.")] = None,
    like: Annotated[str | None, typer.Option(help="Data set whose column encoding is reused for Parquet.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Parquet column to copy to the output.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace predictions of another model or of other data.")
    ] = False,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Recompute every chunk.")] = False,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    performance: Performance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict all rows of a data set, chunk by chunk, each exactly once; run it again to resume."""
    pipeline, say = load("pipelines.predict"), stderr_printer(quiet)
    flags = {
        "model": model,
        "data": data,
        "out": out,
        "outputs": split_names(outputs),
        "expectations": split_pairs(expectation, "--expectation"),
        "top_k": top_k,
        "format": format,
        "split": split,
        "like": like,
        "id_column": id_column,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    cluster, settings = _settings(config, overrides, scheduler, given)
    if settings is not None and config is not None:
        job = pipeline.job_of(settings, config.stem)
    else:
        missing = [flag for flag in ("model", "data", "out") if flag not in given]
        if missing:
            raise ConfigError(f"--{missing[0]} is missing; give --model, --data and --out, or a config file")
        wanted = _config_of_flags(given, scheduler).predict
        job = pipeline.standalone(given["model"], given["data"], given["out"], wanted)
    listener = load("pipelines.folder").Listener(say=say)
    with performance_notice(performance, say):
        result = pipeline.run_job(
            job, cluster, fresh=from_scratch, overwrite=overwrite, listener=listener, performance=performance
        )
    print_result(
        result,
        as_json,
        f"{result['rows']:,} rows, {result['computed']} chunks computed, {result['skipped']} done before; "
        f"{result['seconds']:.1f} s, {result['rows_per_second']:,.0f} rows/s",
        f"predictions: {result['predictions']}",
    )
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
    data: Annotated[str | None, typer.Option(help="The data set that was predicted, with labels.")] = None,
    split: Annotated[str | None, typer.Option(help="Split; default: that of the predictions.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for metrics.json and report.html.")] = None,
    overrides: Overrides = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare predictions with labels: accuracy, calibration, confusion, risk against coverage; writes a report."""
    pipeline = load("pipelines.evaluate")
    cluster, settings = _settings(config, overrides, scheduler, {})
    if settings is not None and config is not None and predictions is None:
        result = pipeline.run(settings, name=config.stem)
    else:
        if predictions is None or data is None:
            raise ConfigError("--predictions and --data are required, or a config file")
        folder = out or str(Path(predictions).with_name(f"{Path(predictions).stem}-evaluation"))
        stored = load("data.predictions").open_predictions(predictions)
        with pipeline.executor_for(stored, cluster) as executor:
            metrics = pipeline.evaluate(
                predictions, data, split=split, folder=folder, executor=executor, title=Path(predictions).stem
            )
        result = pipeline.summary_of(metrics, folder)
    percent = {"accuracy": "accuracy", "balanced_accuracy": "balanced"}
    shown = [f"{name} {100 * result[key]:.2f} %" for key, name in percent.items() if key in result]
    if "log_loss" in result:
        shown += [f"log loss {result['log_loss']:.4f}", f"calibration error {100 * result['calibration_error']:.1f} %"]
    print_result(result, as_json, f"{'  '.join(shown)}  ({result['rows']:,} rows)", f"report: {result['report']}")


def _settings(
    config: Path | None, overrides: list[str] | None, scheduler: str | None, flags: dict[str, Any]
) -> tuple[ClusterConfig, Config | None]:
    if config is None:
        if overrides:
            raise ConfigError("--set overrides a key of a config file, and no config file is given")
        return _config_of_flags({}, scheduler).cluster, None
    changes = [f"predict.{key}={json.dumps(value)}" for key, value in flags.items()]
    settings = load_config(config, [*(overrides or []), *changes, *cluster_overrides(scheduler)])
    return settings.cluster, settings


def _config_of_flags(flags: dict[str, Any], scheduler: str | None) -> Config:
    """A config made of flags, validated like one from a file."""
    cluster = {} if scheduler is None else {"kind": "address", "address": scheduler}
    return parse_config({"data": {"source": "none"}, "predict": flags, "cluster": cluster}, "command line")
