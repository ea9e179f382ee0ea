"""`kme-dist learn CONFIG`: learn kernel and regularisation on a cluster. Also `python pipelines/learn.py CONFIG`.

The run folder holds

    config.yaml     the configuration with all defaults
    run.json        status (running, succeeded, failed, interrupted), timings, versions
    metrics.jsonl   one line per step, written during learning
    checkpoints/    state of learning, from which the same command resumes
    learned.zarr    every candidate for the fit: kernels (or features) and regularisations
    data.zarr       the rows, if `data.source` is not a data set

The result depends on data and settings, never on the cluster: a run may be killed and resumed elsewhere, any number of
times. Results of other settings or data are only replaced with `--fresh` (`kme-dist run` replaces them without it);
only `learn.steps` may grow, unless the learning rate has a schedule, as under `model.objective: auto`.

`learn.mode`: `sync` averages gradients in every step, `local` averages replicas after `learn.local_steps` steps each,
`full` learns the explicit features of `model.features` by the exact gradient of all rows. With `model.kind` cen or askl
the estimator itself learns on the workers; `fit` starts from its last checkpoint.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist import CENClassifier, kernels
from kme_dist.config import Config
from kme_dist.core import features as maps
from kme_dist.data.curves import Curves
from kme_dist.data.dataset import Dataset
from kme_dist.data.rows import Scaling
from kme_dist.data.store import load_arrays, save_arrays
from kme_dist.errors import ConfigError
from kme_dist.pipelines import ingest, recipes, tables
from kme_dist.pipelines.folder import CONFIG, Listener, MetricsFile, digest, to_json, to_yaml
from kme_dist.pipelines.stages import Run, Stage
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.full import learn_features
from kme_dist.run.regression import learn_regression
from kme_dist.run.spectral import NAME as SPECTRAL
from kme_dist.run.spectral import LearnedMap
from kme_dist.run.train import Candidate, Recipe, learn_candidates

LEARNED, LEARNED_FORMAT, METRICS = "learned.zarr", "kme-dist/learned", "metrics.jsonl"
CHECKPOINTS, SETTINGS = "checkpoints", "settings.json"
FIT_KEYS = ("calibration",)  # keys of the section `model` that learning does not depend on
COST_KEYS = ("checkpoint_steps", "checkpoint_seconds", "checkpoints_kept", "feature_cache")  # nor on these
StepCallback = Callable[[dict[str, Any]], None]


# --- what is learned ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnedResult:
    """The content of learned.zarr: candidates of every starting point, or features, or the path of the checkpoints."""

    starts: list[list[Candidate]] = field(default_factory=list)
    features: Any = None
    regularization: float = 1.0  # learned with the features, or the network
    scaling: Scaling | None = None  # the scaling of the features' inputs
    checkpoints: str = ""  # of model.kind cen and askl, in the run folder

    @property
    def digest(self) -> str:
        """Changes with the learned parameters."""
        arrays = {} if self.features is None else {name: np.asarray(a).tolist() for name, a in _arrays(self).items()}
        found = [[_plain(candidate) for candidate in start] for start in self.starts]
        return digest([found, arrays, self.regularization, self.checkpoints])


def load_learned(run: Run) -> LearnedResult | None:
    """The result of the stage in the run folder, with the records of its steps; None if it is not done."""
    path = run.folder.path / LEARNED
    if not path.exists():
        return None
    arrays, found = load_arrays(path)
    if found.get("format") != LEARNED_FORMAT:
        raise ConfigError(f"{path} was not written by `kme-dist learn`; learn again with --fresh")
    if list(found["feature_names"]) != list(run.data.feature_names):
        raise ConfigError(
            f"{path} was learned from columns that differ from those of {run.data.path}; choose another output.folder"
        )
    if "checkpoints" in found:
        return LearnedResult(checkpoints=found["checkpoints"], regularization=float(found["regularization"]))
    if "features" in found:
        held = {name.removeprefix("features/"): a for name, a in arrays.items() if name.startswith("features/")}
        scaling = Scaling.restored(arrays)
        learned = maps.from_config(found["features"], arrays=held)
        return LearnedResult(features=learned, regularization=float(found["regularization"]), scaling=scaling)
    only = {"name": found["objective"], **{key: found[key] for key in ("kernel", "regularization")}}
    stored = found.get("starts") or [{"name": "", "candidates": [only]}]  # older files have one candidate
    lines = MetricsFile(run.folder.path / METRICS).read()
    return LearnedResult(
        [[_candidate(c, start["name"], lines, arrays) for c in start["candidates"]] for start in stored]
    )


def _candidate(
    stored: Mapping[str, Any], start: str, lines: list[dict[str, Any]], arrays: Mapping[str, np.ndarray]
) -> Candidate:
    phases = stored.get("phases") or [stored.get("phase", stored["name"])]
    own = [line for line in lines if line.get("phase") in phases and line.get("start", "") == start]
    kernel = kernels.from_config(stored["kernel"])
    learned = None if "map" not in stored else LearnedMap.restored(stored["map"], _within(arrays, stored["map"]["at"]))
    curves = Curves.restored(arrays, stored["curves"]) if "curves" in stored else None
    return Candidate(stored["name"], kernel, float(stored["regularization"]), own, stored.get("loss"), curves, learned)


def _within(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _phase(candidate: Candidate) -> str | None:
    """What its records in the metrics are named: under "auto" that of the objective, not of the candidate."""
    return candidate.history[-1]["phase"] if candidate.history else None


def _plain(candidate: Candidate) -> dict[str, Any]:
    kernel = candidate.kernel.to_config()
    facts = {"name": candidate.name, "kernel": kernel, "regularization": candidate.regularization}
    found = {} if candidate.learned is None else {"map": candidate.learned.to_plain()}
    found |= {} if candidate.curves is None else {"curves": f"curves-{candidate.curves.digest}/"}
    phases = list(dict.fromkeys(record["phase"] for record in candidate.history))
    found |= {"phases": phases} if len(phases) > 1 else {}
    return {**facts, "phase": _phase(candidate), "loss": candidate.loss, **found}


def _arrays(learned: LearnedResult) -> dict[str, np.ndarray]:
    return {} if learned.features is None else dict(learned.features.arrays)


def _summary(learned: LearnedResult) -> dict[str, Any]:
    """Kernel or features and regularisation; of several candidates, those of the first."""
    if learned.checkpoints:
        return {"regularization": learned.regularization}
    if learned.features is not None:
        return {"features": learned.features.to_config(), "regularization": learned.regularization}
    first = learned.starts[0][0]
    return {"kernel": first.kernel.to_config(), "regularization": first.regularization}


def _save(run: Run, learned: LearnedResult, steps: int) -> None:
    """Store as arrays and JSON; kernels and features apply to rows scaled by `(x - shift) * factor`."""
    settings, data = run.resolved, run.data
    kind = settings["model"]["scaling"]
    kind = "standard" if kind == "auto" and run.config.model.kind == recipes.REGRESSION else kind
    scaling = Scaling.of(data.split_statistics(data.training_split()), kind)
    arrays = scaling.stored()
    arrays |= {f"features/{name}": value for name, value in _arrays(learned).items()}
    attributes = {
        "format": LEARNED_FORMAT,
        **_summary(learned),
        "objective": settings["model"]["objective"],
        "mode": settings["learn"]["mode"],
        "local_steps": settings["learn"]["local_steps"] if settings["learn"]["mode"] == "local" else None,
        "batch_size": settings["learn"]["batch_size"],
        "batches_per_step": settings["learn"]["batches_per_step"],
        "steps": steps,
        "data": data.path,
        "feature_names": data.feature_names,
        "classes": data.class_names,
    }
    if learned.starts:
        attributes["starts"] = [
            {"name": start.name, "candidates": [_plain(candidate) for candidate in found]}
            for start, found in zip(run.starts, learned.starts, strict=True)
        ]
        for candidate in (candidate for start in learned.starts for candidate in start):
            if (found := candidate.learned) is not None:
                arrays |= {found.to_plain()["at"] + name: value for name, value in found.arrays.items()}
            if candidate.curves is not None:
                arrays |= candidate.curves.stored(_plain(candidate)["curves"])
    if learned.checkpoints:
        attributes |= {"kind": run.config.model.kind, "checkpoints": learned.checkpoints}
    save_arrays(run.folder.path / LEARNED, arrays, attributes)


# --- the stage ------------------------------------------------------------------------------------------------


def _work(run: Run) -> dict[str, Any]:
    run.folder.remove(*run.outdated)
    run.folder.store(CONFIG, to_yaml(run.resolved).encode())
    saved, began = CheckpointFolder.of(run).open(), time.monotonic()
    with MetricsFile(run.folder.path / METRICS) as lines:
        if run.config.model.kind not in ("mce", recipes.REGRESSION):
            learned = _learn_network(run, saved, lines)
        elif recipes.has_given_features(run.config):
            learned = _learn_features(run, saved, lines)
        else:
            learned = _learn_kernels(run, saved, lines)
        steps, history = lines.steps, lines.read()
        steps_now = lines.written * (run.config.learn.local_steps if run.config.learn.mode == "local" else 1)
    (run.folder.path / METRICS).touch()
    _save(run, learned, steps)
    saved.close()
    shown = [r for r in history if not learned.starts or r.get("phase") == _phase(learned.starts[0][0])]
    last = shown[-1] if shown else {}
    wanted = ("objective", "risk", "complexity", "accuracy", "rows_per_second", "waiting_share", "workers")
    return {
        "status": "succeeded",
        "folder": str(run.folder.path),
        "learned": str(run.folder.path / LEARNED),
        "steps": steps,
        "steps_now": steps_now,
        "seconds": round(time.monotonic() - began, 3),
        **_summary(learned),
        **{key: last[key] for key in wanted if key in last},
    }


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one combination of settings and data, in the run folder."""

    run: Run
    path: Path
    opened: list[Checkpoints] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> CheckpointFolder:
        return cls(run, run.folder.path / CHECKPOINTS / digest(_lasting_inputs(run))[:16])

    def open(self) -> CheckpointFolder:
        """Start, or resume existing checkpoints."""
        if self.run.folder.fresh:
            self.run.folder.remove(f"{CHECKPOINTS}/{self.path.name}")
        if not self.path.exists():
            self.run.folder.remove(METRICS)
            self.run.folder.store(f"{CHECKPOINTS}/{self.path.name}/{SETTINGS}", to_json(_lasting_inputs(self.run)))
        return self

    def refuse_others(self) -> None:
        """ConfigError if the run folder has results of other settings or data."""
        for path in self.path.parent.glob(f"*/{SETTINGS}"):
            if path.parent == self.path:
                continue
            before = self.run.folder.read(str(path.relative_to(self.run.folder.path)))
            now = json.loads(to_json(_lasting_inputs(self.run)))
            key = next(key for key in {**now, **before} if before.get(key) != now.get(key))
            section = next((name for name in ("learn", "model") if key in self.run.resolved[name]), "")
            changed = f"{section}.{key}" if section else key
            was, found = (repr(known[key]) if key in known else "not set" for known in (before, now))
            raise ConfigError(
                f"{self.run.folder.path} was learned with other settings or data: {changed} was "
                f"{was}, now it is {found}. Choose another output.folder, restart with "
                "--fresh, or restore those settings and data."
            )

    def refuse_longer(self) -> None:
        """ConfigError if more steps were learned than are requested, before anything stored is changed."""
        if "steps" in _lasting_inputs(self.run) or self.run.config.model.features == SPECTRAL:
            return  # other steps have other checkpoints, or follow from the number of rows
        if (steps := self.run.resolved["learn"]["steps"]) is not None:
            for folder in self.path.glob("*/"):
                Checkpoints(folder).refuse_beyond(steps)

    def watched(self, name: str) -> Any:
        """Checkpoints called `name`; the dashboard is notified when one is written."""
        self.opened.append(checkpoints_at(self.run, self.path / name))
        return self.run.telemetry.watching(self.opened[-1], self.run.image_shape)

    def close(self) -> None:
        """At the end of learning: remove the checkpoints of other settings."""
        for damaged in (line for checkpoints in self.opened for line in checkpoints.damaged):
            self.run.say(f"skipped a damaged checkpoint: {damaged}")
        for other in self.path.parent.iterdir() if self.path.parent.exists() else ():
            if other != self.path:
                self.run.folder.remove(f"{CHECKPOINTS}/{other.name}")


def regularization_of(model: Any) -> float:
    return float(model.regularization_ if hasattr(model, "regularization_") else model.weight_penalty)


def checkpoints_at(run: Run, folder: Path) -> Checkpoints:
    settings = run.config.learn
    return Checkpoints(
        folder,
        every_steps=settings.checkpoint_steps,
        every_s=settings.checkpoint_seconds,
        keep=settings.checkpoints_kept,
    )


def _learn_kernels(run: Run, saved: CheckpointFolder, lines: MetricsFile) -> LearnedResult:
    """Learn candidates with every compared objective from every starting point."""
    found, learn = [], learn_regression if run.config.model.kind == recipes.REGRESSION else learn_candidates
    for number, start in enumerate(run.starts):
        run.listener.start(start.name)
        recipe = recipes.recipe_of(run.config, start.settings, run.training_data, run.executor)
        if not number:
            _say_capped(run, recipe)
        found.append(
            learn(
                run.training_data,
                recipe,
                executor=run.executor,
                checkpoints=lambda objective, number=number: saved.watched(f"{number}-{objective}"),  # type: ignore[misc]
                callback=_step(run, lines, start.name),
            )
        )
    return LearnedResult(found)


def _say_capped(run: Run, recipe: Recipe) -> None:
    asked = run.config.learn.steps
    if asked is None or recipe.objective != "auto":
        return
    most = recipe.settings(recipe.objectives[0], 1).steps
    if asked > most:
        run.say(f"learn: {most} steps, the most under model.objective auto, instead of the {asked} of learn.steps")


def _learn_features(run: Run, saved: CheckpointFolder, lines: MetricsFile) -> LearnedResult:
    """Learn explicit features by exact gradients."""
    data, split = run.training_data, run.data.training_split()
    recipe = recipes.recipe_of(run.config, run.starts[0].settings, data, run.executor)
    found = learn_features(
        data,
        recipes.feature_map_of(run.config, data.features),
        recipe.regularization,
        recipe.settings(recipe.objective, data.split_positive(split)),
        executor=run.executor,
        checkpoints=saved.watched("features"),
        callback=_step(run, lines, ""),
        split=split,
        scaling=recipe.scaling,
        dtype=recipe.dtype,
        cache_bytes=recipes.cache_bytes_of(run.config),
    )
    return LearnedResult(features=found.features, regularization=found.regularization)


def _learn_network(run: Run, saved: CheckpointFolder, lines: MetricsFile) -> LearnedResult:
    """The estimator of model.kind learns on the workers; the fit starts from its last checkpoint."""
    place = saved.path / run.config.model.kind
    watched = (run.sample.X_test, run.sample.y_test) if len(run.sample.y_test) else None
    run.listener.start("")
    model = fit_network(run, place, _step(run, lines, ""), watched)
    return LearnedResult(checkpoints=str(place.relative_to(run.folder.path)), regularization=regularization_of(model))


def fit_network(run: Run, place: Path, step: StepCallback | None = None, watched: Any = None) -> Any:
    """The estimator, fitted on the workers from its last checkpoint; `watched` are rows for a curve."""
    model = recipes.estimator_of(run.config, run.starts[0].settings, client=getattr(run.executor, "client", None))
    further = {"watch": watched} if isinstance(model, CENClassifier) else {}
    return model.fit(run.data, callback=step, checkpoints=checkpoints_at(run, place), **further)


def _step(run: Run, lines: MetricsFile, start: str) -> StepCallback:
    """Report a step to metrics, dashboard and listener; steps of a comparison model to the listener only."""

    def step(record: dict[str, Any]) -> None:
        own = record.get("phase") != "softmax"
        if own:
            lines.write({"start": start, **record} if start else record)
        run.listener.step(record)
        if own:
            run.telemetry.step(record)

    return step


def _inputs(run: Run) -> dict[str, Any]:
    settings = {**run.resolved["model"], **run.resolved["learn"]}
    if not settings["delay"]:
        del settings["delay"]  # unknown to older runs
    return {
        **{key: value for key, value in settings.items() if key not in (*FIT_KEYS, *COST_KEYS)},
        "data": run.data.digest,
    }


def _lasting_inputs(run: Run) -> dict[str, Any]:
    """The inputs that identify a checkpoint. A longer run resumes a shorter one, unless the rate has a schedule, as it
    always has under "auto"."""
    inputs = _inputs(run)
    if run.config.learn.schedule == "constant" and inputs.get("objective") != "auto":
        inputs.pop("steps", None)
    return inputs


STAGE = Stage("learn", _work, _inputs, lambda run: [LEARNED, METRICS])


def rehearse(run: Run) -> None:
    """Try the settings on a few rows, unless learning is done, before anything stored is changed."""
    if isinstance(run.source, tables.Large) or run.is_current(ingest.STAGE, STAGE):
        return
    rows = tables.sample(run.source, 1000) if isinstance(run.source, Dataset) else run.source
    recipes.rehearse(run.config, rows.X_train, rows.y_train)


def run(
    config: Config,
    *,
    name: str,
    fresh: bool = False,
    listener: Listener | None = None,
    command: str = "",
    performance: Path | None = None,
) -> dict[str, Any]:
    """Learn according to `config`, or resume an earlier call; returns the output of `kme-dist learn --json`.

    `performance` is a file for Dask's performance report.
    """
    again = (STAGE.name,) if fresh else ()
    with Run.open(
        config, name=name, fresh=again, listener=listener, command=command, performance=performance
    ) as current:
        rehearse(current)
        if not fresh and (current.folder.path / LEARNED).exists():
            ingest.check_source(config, current.folder.path)  # before the rows are replaced
        current.do(ingest.STAGE)
        if not fresh:
            saved = CheckpointFolder.of(current)  # hours of learning must not be lost by mistake
            saved.refuse_others()
            saved.refuse_longer()
        summary = current.do(STAGE)
        if STAGE.name not in current.folder.done_now:
            return {**summary, "steps_now": 0}
        current.folder.write(summary=summary)
        return summary


if __name__ == "__main__":
    from kme_dist.cli import main

    main(["learn", *sys.argv[1:]])
