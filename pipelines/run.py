"""`kme-dist run CONFIG`: every stage from the source to the report, over the workers. Also `python pipelines/run.py`.

    ingest     data.zarr           the rows, divided into `train` and `test` (a data set that is so already stays put)
    learn      checkpoints/        kernel and regularisation, from every starting point, under every objective compared
    fit        model.zarr          the embedding on all training rows; the best of what was learned is kept
    predict    predictions.zarr    the test rows, chunk by chunk, each exactly once
    evaluate   metrics.json        figures of the test rows
    report     report.html         the same with pictures

Beside these the run folder holds config.yaml (every default spelled out), metrics.jsonl (one line per learning step,
written while learning goes on) and run.json (status, timings, versions, digests). A stage whose inputs have not changed
is not done again, so a second call with the same configuration, data and version returns the finished result, and a
call after a kill resumes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist import MCEClassifier, kernels, load
from kme_dist.backend import blas_threads
from kme_dist.config import ClusterConfig, Config, Start
from kme_dist.core.optim import cosine_decay
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.ingest import parse_bytes
from kme_dist.errors import ConfigError
from kme_dist.ops.cluster import backend_of, in_words, open_executor
from kme_dist.ops.telemetry import Telemetry, performance_report, telemetry
from kme_dist.pipelines import evaluate, features, learn, predict, report, tables
from kme_dist.pipelines.folder import Listener, MetricsFile, RunFolder, digest, to_json, to_yaml
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor
from kme_dist.run.train import Candidate, Recipe, Trained, fit_candidates, learn_candidates

ROWS_TO_REHEARSE = 20  # of each class
ROWS_TO_DRAW = 20_000  # of either part, that the report may look at
OUT_OF_DATE = ("model.zarr", "metrics.json", "report.html")  # once something new is learned or fitted
OVER_WORKERS = ("learn", "fit", "predict", "evaluate")
HEADLINES = ("accuracy", "balanced_accuracy", "log_loss", "brier", "calibration_error")


@dataclass
class Attempt:
    """One starting point: its settings, and with several of them those of the model without learning, to compare."""

    name: str
    settings: dict[str, Any]  # of the estimator
    folder: str  # in the run folder
    given: Any = None
    model: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    metrics_given: dict[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        history = self.model.history_
        return float(history[-1]["objective"]) if history else float("inf")

    @property
    def as_given(self) -> dict[str, Any]:
        return {**self.settings, "steps": 0, "refit_regularization": False}


@dataclass
class Job:
    """Everything that is known before the first step."""

    name: str
    config: Config
    resolved: dict[str, Any]
    found: Dataset | tables.Tables | None
    attempts: list[Attempt]

    @cached_property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """What every stage depends on; each depends on the one before it."""
        parts = {key: value for key, value in self.resolved.items() if key not in ("output", "cluster")}
        given = parts["model"] | parts["learn"] | parts["fit"]
        fit_only = set(parts["fit"]) | {"calibration"}
        own = {
            "ingest": {"data": tables.fingerprint(self.config.data)},
            "learn": {key: value for key, value in given.items() if key not in fit_only},
            "fit": {key: given[key] for key in sorted(fit_only) if key in given},
            "predict": parts["predict"],
            "evaluate": {},
            "report": {"config": parts, "name": self.name},
        }
        before, chained = "", {}
        for stage, inputs in own.items():
            chained[stage] = {**inputs, "before": before}
            before = digest(chained[stage])
        return chained

    @property
    def outputs(self) -> dict[str, list[str]]:
        models = [f"{a.folder}/given.zarr" for a in self.attempts if a.folder] + ["model.zarr"]
        return {
            "ingest": [] if isinstance(self.found, Dataset) else ["data.zarr"],
            "learn": ["metrics.jsonl"],
            "fit": models,
            "predict": ["predictions.zarr"],
            "evaluate": ["metrics.json"],
            "report": ["report.html"],
        }


class Workers:
    """The cluster of a run: started when the first stage needs it, closed when the run ends."""

    def __init__(self, settings: ClusterConfig, listener: Listener, performance: Path | None) -> None:
        self._settings, self._listener, self._performance = settings, listener, performance
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @cached_property
    def executor(self) -> Executor:
        executor = self._stack.enter_context(open_executor(self._settings))
        self._stack.enter_context(performance_report(executor, self._performance))
        self._listener.say(in_words(executor))
        return executor


def run(
    config: Config,
    *,
    name: str,
    fresh: bool = False,
    listener: Listener | None = None,
    command: str = "",
    performance: Path | None = None,
) -> dict[str, Any]:
    """Do every stage of `config` that is not done yet; returns the summary that `kme-dist run --json` prints.

    `name` is that of the config file; it names the run folder when `output.folder` is absent. With `fresh` finished
    stages are done anew. `command` is what the user typed, for the record; `performance` a file for Dask's report of
    what the cluster did.
    """
    listener = listener or Listener()
    job = _prepare(config, name)
    opened = RunFolder.open(config, name=name, command=command, fresh=fresh, listener=listener)
    with blas_threads(config.model.threads), opened as folder:
        current = [folder.is_current(stage, job.inputs[stage], job.outputs[stage]) for stage in job.inputs]
        if all(current) and folder.known.get("status") == "succeeded":
            return {**folder.known["summary"], "reused": True}
        if not current[1]:
            _rehearse(job)
        with Workers(config.cluster, listener, performance) as workers:
            stages = _Stages(job, folder, workers, listener)
            for stage in job.inputs:
                work = functools.partial(stages.run_stage, stage)
                folder.stage(stage, inputs=job.inputs[stage], outputs=job.outputs[stage], work=work)
        summary = folder.stages["report"]["result"]
        summary["seconds"] = round(sum(folder.stages[stage]["seconds"] for stage in folder.done_now), 3)
        folder.write(summary=summary)
    return {**summary, "reused": False}


def _prepare(config: Config, name: str) -> Job:
    """Read and check everything; whatever is wrong with settings or data is said here."""
    features.check(config)
    resolved = features.resolved(config)
    found = tables.checked(config.data)
    return Job(name, config, resolved, found, _attempts(config, found))


def _attempts(config: Config, found: Dataset | tables.Tables | None) -> list[Attempt]:
    """The settings of the estimator for every starting point."""
    if config.model.kind != "mce":
        return [Attempt("", features.settings_of(config), "")]
    arguments = config.estimator_arguments()
    n_features = len(found.feature_names) if found is not None else None
    if arguments.get("kernel") is None:
        arguments.pop("kernel", None)
    elif n_features is not None:
        arguments["kernel"] = kernels.from_config(arguments["kernel"], n_features=n_features)
    if not config.learn.starts:
        return [Attempt("", arguments, "")]
    if n_features is None:
        raise ConfigError("learn.starts goes with tables that fit in memory; leave it out for larger ones")
    return [
        Attempt(start.name, {**arguments, **_start_arguments(config, start, n_features)}, f"starts/{number}")
        for number, start in enumerate(config.learn.starts)
    ]


def _start_arguments(config: Config, start: Start, n_features: int) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if start.regularization is not None:
        changes["regularization"] = start.regularization
    if start.length_scale is not None:
        kernel = config.model.kernel or MCEClassifier().get_params()["kernel"]
        settings = {"name": kernel, "ard": True} if isinstance(kernel, str) else kernel
        changes["kernel"] = kernels.from_config({**settings, "length_scale": start.length_scale}, n_features=n_features)
    return changes


def _rehearse(job: Job) -> None:
    """One step on a few rows: a setting that cannot work is found before anything stored is touched."""
    if job.found is None:
        return
    rows = job.found if isinstance(job.found, tables.Tables) else tables.sample(job.found, 1000)
    X, y = rows.X_train, rows.y_train
    few = np.concatenate([np.flatnonzero(y == label)[:ROWS_TO_REHEARSE] for label in np.unique(y)])
    if len(np.unique(y[few])) < 2:
        return
    if job.config.model.kind != "mce":
        return features.rehearse(job.config, job.attempts[0].settings, X[few], y[few])
    for attempt in job.attempts:
        model = MCEClassifier(**attempt.settings)
        model.set_params(steps=min(model.steps, 1), solver="auto", centres=None).fit(X[few], y[few])


class _Stages:
    """The work of every stage; each returns plain data for run.json."""

    def __init__(self, job: Job, folder: RunFolder, workers: Workers, listener: Listener) -> None:
        self.job, self.folder, self.workers, self.listener = job, folder, workers, listener
        self.config = job.config
        self.told: Telemetry

    def say(self, line: str) -> None:
        self.listener.say(line)
        self.told.say(line)

    def run_stage(self, stage: str) -> dict[str, Any]:
        """Do a stage, and tell the dashboard and the log how it goes."""
        cluster = self.workers.executor if stage in OVER_WORKERS else None
        log = self.folder.path / "log.jsonl"
        with telemetry(cluster, run=self.job.name, stage=stage, pipeline=self.job.name, log=log) as self.told:
            result: dict[str, Any] = getattr(self, stage)()
        return result

    # --- ingest ------------------------------------------------------------------------------------

    def ingest(self) -> dict[str, Any]:
        self.folder.facts |= {
            "seeds": {"split": self.job.resolved["data"]["split_seed"], "learn": self.job.resolved["learn"]["seed"]},
            "digests": {"config": digest({**self.job.resolved, "output": None, "cluster": None})},
        }
        client = getattr(self.workers.executor, "client", None) if self.job.found is None else None
        dest = self.folder.path / "data.zarr"
        data = tables.stored(self.config.data, dest, self.job.found, client=client, progress=self.listener.progress)
        assert data.classes is not None
        facts = {
            "path": data.path,
            "digest": data.digest,
            "train_rows": data.split_rows("train"),
            "test_rows": data.split_rows("test"),
            "features": data.features,
            "classes": len(data.classes),
        }
        self.listener.say(
            f"{self.job.name}: {facts['train_rows']:,} training rows, {facts['test_rows']:,} test rows, "
            f"{facts['features']} features, {facts['classes']} classes"
        )
        return facts

    @cached_property
    def data(self) -> Dataset:
        return open_dataset(self.folder.stages["ingest"]["result"]["path"])

    # --- learn -------------------------------------------------------------------------------------

    def recipe(self, settings: Mapping[str, Any]) -> Recipe:
        """What the estimator would do with these settings, and what a config adds to them."""
        model = MCEClassifier(**settings)
        learn, fit = self.config.learn, self.config.fit
        further = {key: getattr(fit, key) for key in ("centre_choice", "tolerance", "tile_rows") if hasattr(fit, key)}
        memory = getattr(fit, "memory", None)
        return replace(
            model.recipe(self.data),
            batches_per_step=learn.batches_per_step,
            local_steps=learn.local_steps if learn.mode == "local" else None,
            schedule=cosine_decay if learn.schedule == "cosine" else None,
            train_share=learn.train_share,
            backend=backend_of(self.workers.executor, model.backend),
            fit={key: value for key, value in further.items() if value is not None}
            | ({"memory": parse_bytes(memory)} if isinstance(memory, str) else {}),
        )

    def learn(self) -> dict[str, Any]:
        self.folder.remove(*OUT_OF_DATE)
        self.folder.place.write("config.yaml", to_yaml(self.job.resolved).encode())
        wanted = digest(self.job.inputs["learn"])[:16]
        known = self.folder.path / "checkpoints"
        for other in known.iterdir() if known.exists() else ():
            if other.name != wanted or self.folder.fresh:
                self.folder.remove(f"checkpoints/{other.name}")
        if not (known / wanted).exists():
            self.folder.remove("metrics.jsonl")
        attempts = []
        with MetricsFile(self.folder.path / "metrics.jsonl") as lines:
            for number, attempt in enumerate(self.job.attempts):
                self.listener.start(attempt.name)

                def step(record: dict[str, Any], start: str = attempt.name) -> None:
                    own = record.get("phase") != "softmax"  # what the model is compared with is not the model
                    if own:
                        lines.write({"start": start, **record} if start else record)
                    self.listener.step(record)
                    if own:
                        self.told.step(record)

                def checkpoints(objective: str, number: int = number) -> Any:
                    settings = self.config.learn
                    kept = Checkpoints(
                        known / wanted / f"{number}-{objective}",
                        every_steps=settings.checkpoint_steps,
                        every_s=settings.checkpoint_seconds,
                        keep=settings.checkpoints_kept,
                    )
                    return self.told.watching(kept, learn.image_shape(self.data, self.config))

                if self.config.model.kind != "mce":
                    self._features_fitted(step, (self.rows.X_test, self.rows.y_test))
                    attempts.append([])
                    continue
                found = learn_candidates(
                    self.data,
                    self.recipe(attempt.settings),
                    executor=self.workers.executor,
                    split="train",
                    checkpoints=checkpoints,
                    callback=step,
                )
                attempts.append(
                    [{"name": c.name, "kernel": c.kernel.to_config(), "lam": c.regularization} for c in found]
                )
            if not lines.read():
                (self.folder.path / "metrics.jsonl").touch()
        return {"attempts": attempts}

    def _features_fitted(self, step: Any = None, watch: Any = None) -> Any:
        """Of `model.kind` cen and askl: learned from where the last checkpoint is, and fitted."""
        settings = self.config.learn
        kept = Checkpoints(
            self.folder.path / "checkpoints" / digest(self.job.inputs["learn"])[:16] / self.config.model.kind,
            every_steps=settings.checkpoint_steps,
            every_s=settings.checkpoint_seconds,
            keep=settings.checkpoints_kept,
        )
        given, workers = self.job.attempts[0].settings, self.workers.executor
        return features.fitted(
            self.config, given, self.data, executor=workers, checkpoints=kept, callback=step, watch=watch
        )

    @cached_property
    def rows(self) -> tables.Tables:
        """What is drawn, and watched while learning goes on."""
        found = self.job.found
        return found if isinstance(found, tables.Tables) else tables.sample(self.data, ROWS_TO_DRAW)

    def candidates(self) -> list[list[Candidate]]:
        """What the learning has found, with the records it has left."""
        lines = MetricsFile(self.folder.path / "metrics.jsonl").read()
        return [
            [
                Candidate(
                    stored["name"],
                    kernels.from_config(stored["kernel"]),
                    float(stored["lam"]),
                    [
                        line
                        for line in lines
                        if line.get("phase") == stored["name"] and line.get("start", "") == attempt.name
                    ],
                )
                for stored in found
            ]
            for attempt, found in zip(self.job.attempts, self.folder.stages["learn"]["result"]["attempts"], strict=True)
        ]

    # --- fit ---------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        self.folder.remove(*OUT_OF_DATE)
        if self.config.model.kind != "mce":
            model = self._features_fitted()
            model.save(self.folder.path / "model.zarr")
            return {"best": 0, "fits": [{"objective": self.config.model.kind, "steps": len(model.history_)}]}
        facts = []
        for attempt, candidates in zip(self.job.attempts, self.candidates(), strict=True):
            attempt.model, trained = self._fitted(attempt.settings, candidates)
            facts.append(_facts(trained))
            if attempt.folder:
                start = self.recipe(attempt.settings)
                given = [Candidate("given", start.kernel, start.regularization)]
                attempt.given, _ = self._fitted(attempt.as_given, given)
                attempt.given.save(self.folder.path / attempt.folder / "given.zarr")
                attempt.model.save(self.folder.path / attempt.folder / "model.zarr")
        best = min(range(len(facts)), key=lambda i: self.job.attempts[i].objective)
        self.job.attempts[best].model.save(self.folder.path / "model.zarr")
        return {"best": best, "fits": facts}

    def _fitted(self, settings: Mapping[str, Any], candidates: list[Candidate]) -> tuple[Any, Trained]:
        recipe = self.recipe(settings)
        trained = fit_candidates(
            self.data,
            recipe,
            candidates,
            executor=self.workers.executor,
            scratch=self.folder.path / "scratch",
            split="train",
            report=self.say,
        )
        self.folder.remove("scratch")
        return MCEClassifier(**settings).adopt(self.data, recipe, trained, split="train"), trained

    @property
    def best(self) -> int:
        return int(self.folder.stages["fit"]["result"]["best"])

    # --- predict and evaluate ----------------------------------------------------------------------

    def _models(self) -> list[tuple[str, str]]:
        """Every stored model and where its predictions of the test rows go; the one that was kept comes first."""
        compared = [
            (f"{a.folder}/{which}.zarr", f"{a.folder}/{which}-predictions.zarr")
            for a in self.job.attempts
            if a.folder
            for which in ("given", "model")
        ]
        return [("model.zarr", "predictions.zarr"), *compared]

    def predict(self) -> dict[str, Any]:
        settings = self.config.predict
        needed = [*settings.outputs, *(o for o in ("label", "probability") if o not in settings.outputs)]
        own = settings.model_copy(update={"outputs": needed, "format": "zarr", "top_k": settings.top_k})
        found = {}
        for model, out in self._models():
            model_path, out_path = str(self.folder.path / model), str(self.folder.path / out)
            task = predict.Job(self.job.name, model_path, self.data.path, out_path, "test", own)
            found[out] = self._predicted(task)
        if settings.data is not None:
            found["data"] = self._predicted(predict.job_of(self.config, self.job.name))
        return found

    def _predicted(self, task: predict.Job) -> dict[str, Any]:
        return predict.run_job(
            task,
            self.config.cluster,
            fresh=self.folder.fresh,
            overwrite=True,
            listener=self.listener,
            executor=self.workers.executor,
            told=self.told,
        )

    def evaluate(self) -> dict[str, Any]:
        measured = {
            out: evaluate.evaluate(self.folder.path / out, self.data, split="test", executor=self.workers.executor)
            for _, out in self._models()
        }
        best = measured["predictions.zarr"]
        self.folder.place.write("metrics.json", to_json(best))
        return {"metrics": measured}

    # --- report ------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        measured = self.folder.stages["evaluate"]["result"]["metrics"]
        for attempt in self.job.attempts:
            place = self.folder.path / attempt.folder
            attempt.model = load(place / "model.zarr")
            attempt.metrics = measured["predictions.zarr"]
            if attempt.folder:
                attempt.given = load(place / "given.zarr")
                attempt.metrics = measured[f"{attempt.folder}/model-predictions.zarr"]
                attempt.metrics_given = measured[f"{attempt.folder}/given-predictions.zarr"]
        best = self.job.attempts[self.best]
        facts = self.folder.stages["ingest"]["result"]
        page = report.build(
            self.job,
            best,
            self.rows,
            start=features.start_of(self.config, best.settings, self.data.features),
            image_shape=learn.image_shape(self.data, self.config),
            counts=(facts["train_rows"], facts["test_rows"]),
            config_text=to_yaml(self.job.resolved),
            learn_seconds=self.folder.stages["learn"]["seconds"],
            footer=f"kme-dist {metadata.version('kme-dist')} · {self.folder.facts['started']} · "
            f"configuration {digest({**self.job.resolved, 'output': None, 'cluster': None})[:12]}",
        )
        self.folder.place.write("report.html", page.encode())
        return self._summary(best)

    def _summary(self, best: Attempt) -> dict[str, Any]:
        facts = self.folder.stages["ingest"]["result"]
        path = self.folder.path
        return {
            "status": "succeeded",
            "folder": str(path),
            "report": str(path / "report.html"),
            "model": str(path / "model.zarr"),
            "predictions": str(path / "predictions.zarr"),
            **{key: best.metrics[key] for key in HEADLINES},
            **{key: facts[key] for key in ("train_rows", "test_rows", "features", "classes")},
            "steps": sum(len(attempt.model.history_) for attempt in self.job.attempts),
            "objective": report.objective_of(best.model),
            "solver": str(getattr(best.model, "solver_", "features")),
            "regularization": report.regularization_of(best.model),
            "starts": [
                {
                    "name": attempt.name,
                    "accuracy_before": attempt.metrics_given["accuracy"],
                    "accuracy": attempt.metrics["accuracy"],
                    "objective": attempt.objective,
                    "regularization": float(attempt.model.regularization_),
                }
                for attempt in self.job.attempts
                if attempt.given is not None
            ],
        }


def _facts(trained: Trained) -> dict[str, Any]:
    fit = trained.fit
    names = ("solver", "reason", "regularization", "loss", "residual", "iterations", "seconds", "bytes", "rows")
    return {"objective": trained.best.name, "losses": trained.losses, **{name: getattr(fit, name) for name in names}}


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["run", *sys.argv[1:]])
