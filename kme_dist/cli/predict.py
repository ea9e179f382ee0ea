"""Commands of batch inference: predict and evaluate, from a config or without one.

kme-dist predict configs/covtype.yaml
kme-dist predict --model model.zarr --data rows.zarr --out scores.zarr --outputs label,entropy
kme-dist predict --model runs/x --data new.csv --out scores.csv
kme-dist score --model runs/x < rows.csv > scores.csv
kme-dist evaluate --predictions scores.zarr --data rows.zarr
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kme_dist.cli.options import (
    ConfigOptions,
    OnModelChange,
    Output,
    StageOptions,
    covered,
    expand_options,
    load,
    split_names,
    split_pairs,
)
from kme_dist.config import ClusterConfig, Config, parse_config
from kme_dist.errors import ConfigError, counted

PredictConfig = Annotated[Path | None, typer.Argument(help="YAML file; or use --model, --data and --out.")]
EvaluateConfig = Annotated[Path | None, typer.Argument(help="YAML file; or use --predictions and --data.")]


def add_commands(app: typer.Typer) -> None:
    for command in (predict, score, evaluate):
        app.command()(expand_options(command))


Coverage = Annotated[
    float | None, typer.Option(help="Share of new targets inside the intervals of a regressor; default 0.9.")
]
Unseen = Annotated[
    str | None, typer.Option(help="Categories that training rows did not have: zeros (default) or error.")
]


@dataclass(frozen=True)
class PredictOptions:
    """Section `predict` of a config, as options."""

    model: Annotated[str | None, typer.Option(help="Saved model, or a run folder.")] = None
    data: Annotated[str | None, typer.Option(help="Data set, CSV, Parquet or npy file, or folder.")] = None
    out: Annotated[str | None, typer.Option(help="Where to write the predictions: NAME.zarr, .parquet or .csv.")] = None
    outputs: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: label, probability, decision, entropy, rkhs_entropy; of a regressor mean, std, "
            "interval."
        ),
    ] = None
    coverage: Coverage = None
    expectation: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help=r"E\[g(Y) | x] for the g in a YAML or JSON file.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Number of top classes.")] = None
    format: Annotated[str | None, typer.Option(help="zarr, parquet or csv; default: by the name of --out.")] = None
    split: Annotated[str | None, typer.Option(help="Split of the data set; default: all rows.")] = None
    like: Annotated[str | None, typer.Option(help="Data set whose encoding is used instead of the model's.")] = None
    id_column: Annotated[str | None, typer.Option(help="CSV or Parquet column to copy to the output.")] = None
    unseen: Unseen = None
    on_model_change: OnModelChange = None

    def given(self) -> dict[str, Any]:
        """The options that were given, by the keys of the section."""
        plain = ("model", "data", "out", "coverage", "top_k", "format", "split", "like", "id_column", "unseen")
        found = {key: getattr(self, key) for key in (*plain, "on_model_change")}
        found |= {"outputs": split_names(self.outputs), "expectations": split_pairs(self.expectation, "--expectation")}
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class EvaluateOptions:
    predictions: Annotated[str | None, typer.Option(help="Output of `kme-dist predict`.")] = None
    data: Annotated[str | None, typer.Option(help="The data set that was predicted, with labels.")] = None
    split: Annotated[str | None, typer.Option(help="Split; default: that of the predictions.")] = None
    out: Annotated[str | None, typer.Option(help="Folder for metrics.json and report.html.")] = None


def predict(
    wanted: PredictOptions,
    options: StageOptions,
    output: Output,
    config: PredictConfig = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace predictions of another model or of other data.")
    ] = False,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Recompute every chunk.")] = False,
) -> None:
    """Predict all rows of a data set, chunk by chunk, each exactly once; run it again to resume."""
    pipeline, given = load("pipelines.predict"), wanted.given()
    cluster, settings = _settings(config, options, given)
    if settings is not None and config is not None:
        request = pipeline.request_of(settings, config.stem)
    else:
        missing = [flag for flag in ("model", "data", "out") if flag not in given]
        if missing:
            raise ConfigError(f"--{missing[0]} is missing; give --model, --data and --out, or a config file")
        section = _config_of_flags(given, options).predict
        request = pipeline.standalone_request(given["model"], given["data"], given["out"], section)
    with (
        load("pipelines.progress").RunProgress(sys.stderr, quiet=output.quiet) as progress,
        options.performance_notice(progress.say),
    ):
        result = pipeline.run_request(
            request,
            cluster,
            fresh=from_scratch,
            overwrite=overwrite,
            listener=progress.listener,
            performance=options.performance,
        )
    output.result(
        result,
        f"{counted(result['rows'], 'row', ',')} ({result['computed_rows']:,} computed), "
        f"{counted(result['computed'], 'chunk')} computed, {result['skipped']} done before; "
        f"{result['seconds']:.1f} s, {result['rows_per_second']:,.0f} rows/s",
        f"predictions: {result['predictions']}",
    )
    exit_if_incomplete(result)


def exit_if_incomplete(result: dict[str, Any]) -> None:
    """List what has no prediction, and exit with 65 if there is any."""
    for entry in result["quarantined"]:
        last = entry["first_row"] + entry["rows"] - 1
        print(
            f"skipped chunk {entry['chunk']} (quarantined; rows {entry['first_row']} to {last}): {entry['error']}",
            file=sys.stderr,
        )
    for entry in result["first_skipped"]:
        print(f"skipped row {entry['row']}: {entry['error']}", file=sys.stderr)
    if (more := result["skipped_rows"] - len(result["first_skipped"])) > 0:
        print(f"skipped {counted(more, 'further row', ',')}", file=sys.stderr)
    if result["status"] == "incomplete":
        raise typer.Exit(load("pipelines.predict").EXIT_INCOMPLETE)


def score(
    output: Output,
    model: Annotated[str, typer.Option(help="Saved model, or a run folder.")],
    outputs: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: label, probability (both by default), decision, entropy, rkhs_entropy; of a "
            "regressor mean, std, interval (all by default)."
        ),
    ] = None,
    coverage: Coverage = None,
    id_column: Annotated[str | None, typer.Option(help="Column to copy to the output.")] = None,
    format: Annotated[str, typer.Option(help="Output format: csv or jsonl.")] = "csv",
    unseen: Unseen = None,
) -> None:
    """Predict rows from stdin (CSV with a header, or one JSON object per line) to stdout, in this process."""
    if output.as_json:
        format = "jsonl"
    scored = load("pipelines.score").run(
        model,
        sys.stdin.buffer,
        sys.stdout.buffer,
        format=format,
        outputs=split_names(outputs),
        coverage=0.9 if coverage is None else coverage,
        id_column=id_column,
        unseen=unseen or "zeros",
    )
    for note in scored.notes:
        output.say(f"score: {note}")
    if scored.skipped:
        raise typer.Exit(load("pipelines.predict").EXIT_INCOMPLETE)


def evaluate(wanted: EvaluateOptions, options: ConfigOptions, output: Output, config: EvaluateConfig = None) -> None:
    """Compare predictions with labels: accuracy, calibration, confusion, risk against coverage; writes a report."""
    pipeline, predictions = load("pipelines.evaluate"), wanted.predictions
    cluster, settings = _settings(config, options, {})
    if settings is not None and config is not None and predictions is None:
        result = pipeline.run(settings, name=config.stem)
    else:
        if predictions is None or wanted.data is None:
            raise ConfigError("--predictions and --data are required, or a config file")
        title = Path(predictions).stem
        folder = wanted.out or str(Path(predictions).with_name(f"{title}-evaluation"))
        stored = load("data.predictions").open_predictions(predictions)
        with pipeline.executor_for(stored, cluster) as executor:
            metrics = pipeline.evaluate(
                predictions, wanted.data, split=wanted.split, folder=folder, executor=executor, title=title
            )
        result = pipeline.summary_of(metrics, folder)
    rows, percent = result["rows"], {"accuracy": "accuracy", "balanced_accuracy": "balanced"}
    shown = [f"{name} {100 * result[key]:.2f} %" for key, name in percent.items() if key in result]
    if "log_loss" in result:
        shown += [f"log loss {result['log_loss']:.4f}", f"calibration error {100 * result['calibration_error']:.1f} %"]
    if "rmse" in result:
        shown += [f"RMSE {result['rmse']:.5g}", f"MAE {result['mae']:.5g}", f"R2 {result['r2']:.3f}"]
        shown += [covered(result)] if "coverage" in result else []
    output.result(result, f"{'  '.join(shown)}  ({counted(rows, 'row', ',')})", f"report: {result['report']}")
    if missing := result["rows_without_answer"]:
        output.say(f"evaluate: left out {counted(missing, 'row', ',')} without a prediction (skipped or quarantined)")


def _settings(
    config: Path | None, options: ConfigOptions, given: dict[str, Any]
) -> tuple[ClusterConfig, Config | None]:
    if config is None:
        if options.overrides:
            raise ConfigError("--set overrides a key of a config file, and no config file is given")
        return _config_of_flags({}, options).cluster, None
    settings = options.load(config, [f"predict.{key}={json.dumps(value)}" for key, value in given.items()])
    return settings.cluster, settings


def _config_of_flags(flags: dict[str, Any], options: ConfigOptions) -> Config:
    """A config made of flags, validated like one from a file."""
    cluster = options.cluster_section()
    return parse_config({"data": {"source": "none"}, "predict": flags, "cluster": cluster}, "command line")
