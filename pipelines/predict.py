"""`kme-dist predict CONFIG`: a model over all rows of a data set, chunk by chunk. Also `python pipelines/predict.py`.

The section `predict` of the config names model, data and output; what it leaves out is that of the run folder: the
model that `kme-dist run` or `fit` has put there, the test rows of its data, and `predictions.zarr` beside them. Run it
again after a kill, or after rows were appended, and it does what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kme_dist import predict
from kme_dist.config import ClusterConfig, Config, PredictConfig
from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import DATASET_FORMAT, open_dataset
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError
from kme_dist.ops.cluster import in_words, open_executor
from kme_dist.ops.telemetry import Telemetry, performance_report, telemetry
from kme_dist.pipelines.folder import Listener, folder_of
from kme_dist.run.executors import Executor, SerialExecutor
from kme_dist.run.predict import Outcome

T = TypeVar("T")
EXIT_QUARANTINED = 65
FEW_CHUNKS = 4
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Job:
    """Which model over which rows, and where the answers go."""

    name: str
    model: str
    data: str
    out: str
    split: str | None
    settings: PredictConfig


def job_of(config: Config, name: str) -> Job:
    """What the config says, its gaps filled from the run folder."""
    settings, folder = config.predict, folder_of(config, name)
    data, split = settings.data, settings.split
    if data is None:
        data = str(folder / "data.zarr")
        if not Place.of(data).exists():
            data = config.data.source
            if not _is_dataset(data):
                raise ConfigError(
                    f"predict.data is missing, and there is no data set at {folder / 'data.zarr'}; name one, or run "
                    f"`kme-dist run` first"
                )
        if split is None and "test" in open_dataset(data).splits:
            split = "test"
    model = settings.model or str(folder / "model.zarr")
    default = "predictions" if settings.format == "parquet" else "predictions.zarr"
    return Job(name, model, data, settings.out or str(folder / default), split, settings)


def _is_dataset(source: str) -> bool:
    if source.startswith("sklearn:"):
        return False
    place = Place.of(source)
    return place.exists() and read_attributes(place).get("format") == DATASET_FORMAT


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
    """Predict as the config says; `fresh` computes every chunk anew, `overwrite` replaces what another model said."""
    return run_job(
        job_of(config, name),
        config.cluster,
        fresh=fresh,
        overwrite=overwrite,
        listener=listener,
        performance=performance,
    )


def run_job(
    job: Job,
    cluster: ClusterConfig,
    *,
    fresh: bool = False,
    overwrite: bool = False,
    listener: Listener | None = None,
    executor: Executor | None = None,
    told: Telemetry | None = None,
    performance: Path | None = None,
) -> dict[str, Any]:
    """One job over a cluster that is opened for it, or over an executor that is there already.

    Parameters
    ----------
    told : a stage that this job is part of; without one it is a stage of its own
    performance : a file for Dask's report of what a cluster did that was opened here
    """
    listener = listener or Listener()
    again = functools.partial(run_job, job, cluster, fresh=fresh, overwrite=overwrite, listener=listener)
    if executor is None:
        with WhenNeeded(cluster, listener.say, performance) as waiting:
            return again(executor=waiting)
    if told is None:
        with telemetry(executor, run=job.name, stage="predict", pipeline=job.name) as own:
            return again(executor=executor, told=own)
    settings = job.settings
    outcome = predict(
        job.model,
        job.data,
        job.out,
        executor=executor,
        outputs=settings.outputs,
        expectations=settings.expectations,
        top_k=settings.top_k,
        format=settings.format,
        split=job.split,
        like=settings.like,
        id_column=settings.id_column,
        overwrite=overwrite,
        from_scratch=fresh,
        progress=RowProgress(listener),
        watch=told.chunks,
    )
    return summary_of(outcome, job)


def summary_of(outcome: Outcome, job: Job) -> dict[str, Any]:
    """What `kme-dist predict --json` prints."""
    facts = dataclasses.asdict(outcome)
    return {
        "status": "incomplete" if outcome.quarantined else "succeeded",
        "predictions": facts.pop("path"),
        "model": job.model,
        "data": job.data,
        "split": job.split,
        **facts,
    }


class WhenNeeded(SerialExecutor):
    """The cluster of a config, opened when there are chunks for it: not before the input was checked, and not at all
    where a local one would take longer to start than the few chunks take here."""

    def __init__(
        self, settings: ClusterConfig, say: Callable[[str], None] = lambda line: None, performance: Path | None = None
    ) -> None:
        self._settings, self._say, self._performance = settings, say, performance
        self._stack = contextlib.ExitStack()
        self._opened: Executor | None = None

    def __enter__(self) -> WhenNeeded:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def client(self) -> Any:
        return getattr(self._opened, "client", None)

    @property
    def retried(self) -> int:
        return int(getattr(self._opened, "retried", 0))

    def stream(
        self, function: Callable[..., T], calls: Iterable[tuple[Any, ...]], *, name: str, ahead: int | None = None
    ) -> Iterator[tuple[int, T | Exception]]:
        waiting = iter(calls)
        first = list(itertools.islice(waiting, FEW_CHUNKS))
        if self._opened is None and (not first or (len(first) < FEW_CHUNKS and self._settings.kind == "local")):
            return super().stream(function, first, name=name)
        if self._opened is None:
            self._opened = self._stack.enter_context(open_executor(self._settings))
            self._stack.enter_context(performance_report(self._opened, self._performance))
            self._say(f"predict: {in_words(self._opened)}")
        return self._opened.stream(function, itertools.chain(first, waiting), name=name, ahead=ahead)


class RowProgress:
    """Tells a listener how many rows are done, and people how fast it goes and how long it will take."""

    def __init__(self, listener: Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener, self._clock = listener, clock
        self._began: float | None = None
        self._first = 0
        self._last_line = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        self._listener.progress("predict", done, total)
        if self._began is None:
            self._began, self._first = now, done
            if done:
                self._listener.say(f"predict: {done:,} of {total:,} rows were done before")
            return
        if now - self._last_line < SECONDS_BETWEEN_LINES and done < total:
            return
        self._last_line = now
        elapsed = max(now - self._began, 1e-9)
        rate = (done - self._first) / elapsed
        left = f", {_duration((total - done) / rate)} left" if rate > 0 and done < total else ""
        self._listener.say(
            f"predict: {done:,} of {total:,} rows ({done / max(total, 1):.0%}), {rate:,.0f} rows/s{left}"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def standalone(model: str, data: str, out: str, settings: PredictConfig) -> Job:
    """Without a config: `kme-dist predict --model M --data D --out O`."""
    return Job(Path(out).stem, model, data, out, settings.split, settings)


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["predict", *sys.argv[1:]])
