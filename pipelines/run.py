"""`kme-dist run CONFIG`: every stage from the source to the report, on the workers. Also `python pipelines/run.py`.

    ingest     data.zarr           the rows, split into `train` and `test` (a data set with both is used in place)
    learn      learned.zarr        kernel and regularisation, from every starting point, with every compared objective
    fit        model.zarr          the embedding on all training rows; the best candidate is kept
    predict    predictions.zarr    the test rows, chunk by chunk, each exactly once
    evaluate   metrics.json        metrics of the test rows
    report     report.html         the same with plots

With `predict.data` in the config, the rows of that data are predicted too, in every call (to `predict.out`).

Each stage is the same as the command of that name. The run folder also holds config.yaml (with all defaults),
metrics.jsonl (one line per learning step, written during learning) and run.json (status, timings, versions, digests). A
stage whose inputs have not changed is skipped, so a second call with the same configuration, data and version returns
the finished result, and a call after a kill resumes. With other settings or data in the same folder, model, metrics and
report of the earlier run are moved to previous/, and the command says so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kme_dist.config import Config
from kme_dist.errors import ConfigError
from kme_dist.pipelines import evaluate, fit, ingest, learn, predict, report
from kme_dist.pipelines.folder import CONFIG, Listener
from kme_dist.pipelines.stages import Run

STAGES = (ingest.STAGE, learn.STAGE, fit.STAGE, predict.STAGE, evaluate.STAGE, report.STAGE)
OUTDATED = (fit.MODEL, evaluate.METRICS, report.REPORT)  # removed when something new is learned or fitted
REPLACED = (*OUTDATED, fit.STATISTICS, CONFIG)  # kept in previous/ when settings or data are others


def run(
    config: Config,
    *,
    name: str,
    fresh: bool = False,
    listener: Listener | None = None,
    command: str = "",
    performance: Path | None = None,
) -> dict[str, Any]:
    """Run every stage of `config` that is not up to date; returns the summary for `kme-dist run --json`.

    `name` is that of the config file; it names the run folder if `output.folder` is absent. With `fresh` finished
    stages are recomputed. `command` is the user's command line, for the record; `performance` a file for Dask's
    performance report.
    """
    _check_predict(config)
    with Run.open(
        config,
        name=name,
        test_rows=True,
        fresh=[stage.name for stage in STAGES] if fresh else (),
        outdated=OUTDATED,
        listener=listener,
        command=command,
        performance=performance,
    ) as current:
        folder = current.folder
        learn.rehearse(current)
        current.do(ingest.STAGE)
        if not fresh:
            learn.CheckpointFolder.of(current).refuse_longer()
            current.keep_previous(REPLACED, learn.STAGE, fit.STAGE)
        for stage in STAGES[1:]:
            current.do(stage)
        named = predict.predict_named_data(current)
        current.confirm(STAGES)
        reused = not folder.done_now and folder.known.get("status") == "succeeded"
        counted = folder.done_now or [stage.name for stage in STAGES]
        seconds = round(sum(folder.stages[stage]["seconds"] for stage in counted), 3)
        summary = {**current.result(report.STAGE.name), "seconds": seconds}
        if not reused:
            folder.write(summary=summary)
    if named is None:
        return {**summary, "reused": reused}
    skipped = {key: named[key] for key in ("quarantined", "skipped_rows")}
    return {**summary, **skipped, "data_predictions": named, "reused": reused and not named["computed"]}


def _check_predict(config: Config) -> None:
    """ConfigError for keys that belong to `predict.data` where there is none: they would have no effect."""
    given = [f"predict.{key}" for key in ("model", "out") if getattr(config.predict, key) is not None]
    if given and config.predict.data is None:
        raise ConfigError(
            f"{' and '.join(given)} without predict.data has no effect in `kme-dist run`, which predicts its test rows "
            "with its own model into its run folder; add `data: PATH` with the rows to predict to the section predict, "
            f"remove {' and '.join(given)}, or use `kme-dist predict CONFIG`"
        )


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["run", *sys.argv[1:]])
