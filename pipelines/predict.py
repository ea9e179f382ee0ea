"""`kme-dist predict CONFIG`: predict all rows of a data set, chunk by chunk. Also `python pipelines/predict.py`.

The section `predict` of the config names model, data and output; absent keys default to the run folder: the model of
`kme-dist run` or `fit`, the test rows of its data, and `predictions.zarr`. After a kill, or after rows were appended,
the same command predicts what is missing. In a run, `STAGE` predicts the test rows; then `predict_named_data` predicts
the data that the section names, in every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kme_dist import predict
from kme_dist.config import ClusterConfig, Config, PredictConfig
from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import Dataset
from kme_dist.data.places import Place
from kme_dist.data.receipts import read_state
from kme_dist.errors import ConfigError, KMEError
from kme_dist.models.base import model_place
from kme_dist.models.outputs import REGRESSION_OUTPUTS
from kme_dist.models.predict import model_digest
from kme_dist.ops.cluster import in_words, open_executor
from kme_dist.ops.jobs import new_id
from kme_dist.ops.telemetry import Telemetry, performance_report, telemetry
from kme_dist.pipelines import ingest, recipes, tables
from kme_dist.pipelines.fit import MODEL
from kme_dist.pipelines.folder import Listener, folder_of
from kme_dist.pipelines.ingest import DATA
from kme_dist.pipelines.stages import Run, Stage
from kme_dist.run.executors import Executor, SerialExecutor
from kme_dist.run.predict import PredictionOutcome
from kme_dist.run.streams import Calls

T = TypeVar("T")
EXIT_INCOMPLETE = 65
PREDICTIONS = "predictions.zarr"
NAMED_DATA = "data-predictions"  # of the data that the config names
FEW_CHUNKS = 4
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class PredictRequest:
    """Model, rows and destination of a prediction."""

    name: str
    model: str
    data: str
    out: str
    split: str | None
    settings: PredictConfig


def request_of(config: Config, name: str) -> PredictRequest:
    """The request of a config, with absent keys filled from the run folder."""
    settings, folder = config.predict, folder_of(config, name)
    ingest.check_source(config, folder)
    own = _rows_of_run(config, folder)
    data, split = settings.data, settings.split
    if data is None:
        if own is None:
            raise ConfigError(
                f"predict.data is missing, and {folder / DATA} does not exist; set predict.data, or run "
                f"`kme-dist run` first"
            )
        data = own.path
        if split is None and "test" in own.splits:
            split = "test"
    elif settings.like is None and own is not None:
        settings = settings.model_copy(update={"like": own.path})  # files are encoded like the rows of the run
    model = settings.model or str(folder / MODEL)
    stem = "predictions" if settings.data is None else NAMED_DATA  # those of the test rows stay where they are
    default = {"parquet": stem, "csv": f"{stem}.csv"}.get(settings.format or "", f"{stem}.zarr")
    out = _destination(settings.out or str(folder / default), model, settings)
    return PredictRequest(name, model, data, out, split, settings)


def _destination(out: str, model: str, settings: PredictConfig) -> str:
    """Where to write; beside it, to a path named by the model, if it has predictions of another one, and
    `on_model_change` says so."""
    if settings.on_model_change != "new-folder":
        return out
    place = Place.of(out)
    if (settings.format or place.name.rpartition(".")[2].lower()) == "csv":
        raise ConfigError(
            f"predict.on_model_change: new-folder is not supported for CSV ({out}); choose Zarr or Parquet"
        )
    earlier, digest = read_state(place), model_digest(model_place(model))
    if earlier is None or earlier["computed_from"].get("model") == digest:
        return out
    stem, dot, suffix = place.name.rpartition(".")
    return place.sibling(f"{stem or suffix}-{digest[:8]}{dot}{suffix if dot else ''}").address


def _rows_of_run(config: Config, folder: Path) -> Dataset | None:
    """The data set of a run: a copy in its folder, or data.source itself."""
    return tables.dataset_at(str(folder / DATA)) or tables.dataset_at(config.data.source)


def standalone_request(model: str, data: str, out: str, settings: PredictConfig) -> PredictRequest:
    """The request of `kme-dist predict --model M --data D --out O`, without a config."""
    return PredictRequest(Path(out).stem, model, data, _destination(out, model, settings), settings.split, settings)


def run(
    config: Config,
    *,
    name: str,
    fresh: bool = False,
    overwrite: bool = False,
    listener: Listener | None = None,
    command: str = "",
    performance: Path | None = None,
) -> dict[str, Any]:
    """Predict according to the config; `fresh` recomputes every chunk, `overwrite` replaces those of another model."""
    return run_request(
        request_of(config, name),
        config.cluster,
        fresh=fresh,
        overwrite=overwrite,
        listener=listener,
        performance=performance,
    )


def run_request(
    request: PredictRequest,
    cluster: ClusterConfig,
    *,
    fresh: bool = False,
    overwrite: bool = False,
    listener: Listener | None = None,
    performance: Path | None = None,
) -> dict[str, Any]:
    """Run one request on a cluster that is opened if there are chunks to compute.

    `performance` is a file for Dask's performance report.
    """
    listener = listener or Listener()
    with (
        LazyExecutor(cluster, listener.say, performance) as executor,
        telemetry(
            executor,
            run=listener.run_id or new_id(request.name),
            stage="predict",
            pipeline=request.name,
            scheduled=listener.scheduled,
        ) as stage,
    ):
        result = predict_rows(request, executor, stage, listener, fresh=fresh, overwrite=overwrite)
        if listener.scheduled:
            executor.connect()
        _close_incomplete(stage, result)
    return result


def _close_incomplete(stage: Telemetry, result: dict[str, Any]) -> None:
    """Rows without a prediction fail the command and the job (exit code 65), so the stage has not succeeded either."""
    if result["status"] != "succeeded":
        skipped = {"quarantined": len(result["quarantined"]), "skipped_rows": result["skipped_rows"]}
        stage.close("failed", error="CorruptError", exit_code=EXIT_INCOMPLETE, **skipped)


def predict_rows(
    request: PredictRequest,
    executor: Executor,
    reported_to: Telemetry,
    listener: Listener,
    *,
    fresh: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Predict the rows of a request, chunk by chunk; returns the output of `kme-dist predict --json`."""
    settings = request.settings
    outcome = predict(
        request.model,
        request.data,
        request.out,
        executor=executor,
        outputs=outputs_of(settings, request.model),
        coverage=settings.coverage,
        expectations=settings.expectations,
        top_k=settings.top_k,
        format=settings.format,
        split=request.split,
        like=settings.like,
        unseen=settings.unseen,
        id_column=settings.id_column,
        overwrite=overwrite,
        from_scratch=fresh,
        on_model_change="recompute" if settings.on_model_change == "recompute" else "refuse",
        progress=RowProgress(listener),
        watch=reported_to.chunks,
    )
    for note in outcome.notes:
        listener.say(f"predict: {note}")
    return _summary(outcome, request)


def outputs_of(settings: PredictConfig, model: str) -> list[str]:
    """Those of the config; where it has none and the model is a regressor, those of regressors."""
    if "outputs" in settings.model_fields_set:
        return list(settings.outputs)
    try:
        kind = read_attributes(model_place(model)).get("model")
    except FileNotFoundError:  # `predict` says so
        kind = None
    return list(REGRESSION_OUTPUTS if kind == "CMERegressor" else settings.outputs)


# --- the stage of a run ---------------------------------------------------------------------------------------


def models_of(run: Run) -> list[tuple[str, str]]:
    """Every stored model and the path of its predictions of the test rows; the model that was kept comes first."""
    compared = [
        (f"{start.folder}/{which}.zarr", f"{start.folder}/{which}-predictions.zarr")
        for start in run.starts
        if start.folder
        for which in ("given", "model")
    ]
    return [(MODEL, PREDICTIONS), *compared]


def _work(run: Run) -> dict[str, Any]:
    settings, place = run.config.predict, run.folder.path
    numeric = run.config.model.kind == recipes.REGRESSION
    given = outputs_of(settings, str(place / MODEL))
    always = REGRESSION_OUTPUTS if numeric else ("label", "probability")
    needed = [*given, *(name for name in always if name not in given)]
    own = settings.model_copy(update={"outputs": needed, "format": "zarr", "id_column": None})
    found = {}
    for model, out in models_of(run):
        found[out] = _predicted(
            run, PredictRequest(run.name, str(place / model), run.data.path, str(place / out), "test", own)
        )
    return found


def _predicted(run: Run, request: PredictRequest) -> dict[str, Any]:
    return predict_rows(request, run.executor, run.telemetry, run.listener, fresh=run.folder.fresh, overwrite=True)


def _inputs(run: Run) -> dict[str, Any]:
    return {"predict": run.resolved["predict"], "data": run.data.digest, "model": run.inputs_digest("fit")}


def predict_named_data(run: Run) -> dict[str, Any] | None:
    """Predict the data that the config names, if it does: in every call, since what is complete takes no time, and rows
    may have been appended or predictions removed. Those of another model are treated as `on_model_change` says, except
    in the run folder, whose results are all of the same model."""
    settings = run.config.predict
    if settings.data is None:
        return None
    own_place = settings.out is None and run.config.output.overwrite
    run.listener.begin(NAMED_DATA)
    with contextlib.ExitStack() as stack:
        lazy = LazyExecutor(run.workers.settings, run.listener.say, run.workers.performance)
        executor = run.executor if run.workers.started else stack.enter_context(lazy)
        report = stack.enter_context(run.reporting(executor, NAMED_DATA))
        result = predict_rows(
            request_of(run.config, run.name),
            executor,
            report,
            run.listener,
            fresh=STAGE.name in run.fresh,
            overwrite=own_place,
        )
        if run.listener.scheduled and isinstance(executor, LazyExecutor):
            executor.connect()
        _close_incomplete(report, result)
    run.listener.end(NAMED_DATA)
    return result


STAGE = Stage("predict", _work, _inputs, lambda run: [out for _, out in models_of(run)])


def _summary(outcome: PredictionOutcome, request: PredictRequest) -> dict[str, Any]:
    facts = dataclasses.asdict(outcome)
    return {
        "status": "succeeded" if outcome.complete else "incomplete",
        "predictions": facts.pop("path"),
        "model": request.model,
        "data": request.data,
        "split": request.split,
        **facts,
    }


class LazyExecutor(SerialExecutor):
    """The cluster of a config, opened when there are chunks to compute: after the input was checked, and not at all if
    starting a local one would take longer than computing the few chunks here."""

    def __init__(
        self, settings: ClusterConfig, say: Callable[[str], None] = lambda line: None, performance: Path | None = None
    ) -> None:
        super().__init__()
        self._settings, self._say, self._performance = settings, say, performance
        self._stack = contextlib.ExitStack()
        self._opened: Executor | None = None

    def __enter__(self) -> LazyExecutor:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def connect(self) -> None:
        """Connect to a cluster that runs anyway, so that it is told of a success that had nothing to compute. One that
        does not answer makes nothing fail."""
        if self._opened is None and self._settings.kind == "address":
            with contextlib.suppress(KMEError):
                self._opened = self._stack.enter_context(open_executor(self._settings))

    @property
    def client(self) -> Any:
        return getattr(self._opened, "client", None)

    @property
    def retried(self) -> int:
        return int(getattr(self._opened, "retried", 0))

    def stream(
        self, function: Callable[..., T], calls: Calls, *, name: str, ahead: int | None = None
    ) -> Iterator[tuple[int, T | Exception]]:
        few = len(calls) < FEW_CHUNKS and self._settings.kind == "local"
        if self._opened is None and (few or not len(calls)):
            return super().stream(function, calls, name=name)
        if self._opened is None:
            self._opened = self._stack.enter_context(open_executor(self._settings))
            self._stack.enter_context(performance_report(self._opened, self._performance))
            self._say(f"predict: {in_words(self._opened)}")
        return self._opened.stream(function, calls, name=name, ahead=ahead)


class RowProgress:
    """Reports the rows done to a listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._begun = listener, False

    def __call__(self, done: int, total: int) -> None:
        if not self._begun and done:
            self._listener.say(f"predict: {done:,} of {total:,} rows were done before")
        self._begun = True
        self._listener.progress("predict", done, total)


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["predict", *sys.argv[1:]])
