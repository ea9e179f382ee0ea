"""Runs whose model learns its own features: `model.kind: cen` and `model.kind: askl` of `kme-dist run`.

    model:
      kind: cen
      options: {hidden: [64, 32]}       # whatever CENClassifier takes beyond the keys of the sections

The sections say what they say for every model (`learn.steps`, `model.scaling`, ...); `options` holds the rest of the
estimator's parameters. Learning and fitting are the estimator's own `fit` over the workers: the stage `learn` leaves
its last checkpoint, from which the stage `fit` resumes without a step and solves for the weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from kme_dist import ASKLClassifier, CENClassifier, MCEClassifier
from kme_dist.config import Config, FitConfig, LearnConfig, ModelConfig
from kme_dist.data.dataset import Dataset
from kme_dist.errors import ConfigError
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import Executor

KINDS: dict[str, Any] = {"cen": CENClassifier, "askl": ASKLClassifier}
SECTIONS = {"model": ModelConfig, "learn": LearnConfig, "fit": FitConfig}
NOT_OPTIONS = ("client", "verbose")


def refuse(config: Config, command: str) -> None:
    """For commands that learn a kernel, or the features of `model.features`."""
    if config.model.kind != "mce":
        raise ConfigError(f"model.kind is {config.model.kind!r}: `kme-dist {command}` takes mce; use `kme-dist run`")


def check(config: Config) -> None:
    """What a run cannot do is said before it begins."""
    kind = config.model.kind
    if config.model.features is not None:
        way = "model.kind cen with options: {network: ...}" if kind != "askl" else "options: {features: 500}"
        raise ConfigError(f"model.features is learned by `kme-dist learn`; for a run, write {way}")
    if kind == "mce" and config.model.options:
        raise ConfigError("model.options go with model.kind cen or askl; mce takes the keys of the sections")
    if kind != "mce" and config.learn.starts:
        raise ConfigError(f"learn.starts are of kernels; model.kind is {kind!r}, leave them out")
    if kind != "mce" and config.learn.mode != "sync":
        raise ConfigError(f"learn.mode is {config.learn.mode!r}: with model.kind {kind!r} leave it out; without "
                          "learn.batch_size a network takes the exact gradient of all rows")  # fmt: skip


def settings_of(config: Config) -> dict[str, Any]:
    """The parameters of the estimator that the config sets."""
    kind, options = config.model.kind, dict(config.model.options or {})
    known = set(KINDS[kind]().get_params()) - set(NOT_OPTIONS)
    owners = {key: f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields}
    del owners["features"]  # of askl it is how many
    owners["random_state"] = "learn.seed"
    free = sorted(known - set(owners))
    for key in options:
        if key in owners:
            raise ConfigError(f"model.options.{key}: write {owners[key]}")
        if key not in known:
            near = difflib.get_close_matches(key, free, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(free)}"
            raise ConfigError(f"model.options.{key} is unknown with model.kind {kind!r}; {hint}")
    given = config.estimator_arguments()
    given |= {k: getattr(config.learn, k) for k in ("schedule", "batches_per_step") if k in config.learn.given()}
    for key in given:
        if key not in known:
            raise ConfigError(f"{owners[key]} does not go with model.kind {kind!r}; options: {', '.join(free)}")
    if kind == "askl" and options.setdefault("loss", "cross_entropy") != "cross_entropy":
        raise ConfigError(
            f"model.options.loss is {options['loss']!r}: a run reports probabilities, which come with cross_entropy"
        )
    if "hidden" in options:
        options["hidden"] = tuple(options["hidden"])
    return {**given, **options}


def resolved(config: Config) -> dict[str, Any]:
    """Everything spelled out, by the defaults of the estimator that is learned."""
    if config.model.kind == "mce":
        return config.resolved(MCEClassifier().get_params())
    model = KINDS[config.model.kind](**settings_of(config))
    full = config.resolved(model.get_params())
    full["learn"] |= {key: getattr(model, key) for key in ("schedule", "batches_per_step")}
    return full


def estimator(config: Config, settings: Mapping[str, Any], **further: Any) -> Any:
    return KINDS[config.model.kind](**{**settings, **further})


def fitted(
    config: Config,
    settings: Mapping[str, Any],
    data: Dataset,
    *,
    executor: Executor,
    checkpoints: Checkpoints,
    callback: Callable[[dict[str, Any]], None] | None = None,
    watch: tuple[Any, Any] | None = None,
) -> Any:
    """The estimator, fitted to the training rows over the workers; `watch` are rows for a curve, where it draws one."""
    model = estimator(config, settings, client=getattr(executor, "client", None))
    further = {"watch": watch} if isinstance(model, CENClassifier) else {}
    return model.fit(data, callback=callback, checkpoints=checkpoints, **further)


def rehearse(config: Config, settings: Mapping[str, Any], X: Any, y: Any) -> None:
    """One step (or epoch) on a few rows."""
    once = {"steps": min(1, settings.get("steps", 1))} if config.model.kind == "cen" else {"epochs": 1}
    estimator(config, settings, **once).fit(X, y)


def start_of(config: Config, settings: Mapping[str, Any], n_features: int) -> Any:
    """The map that learning began with, for pictures of what has moved; None where a kernel is learned."""
    if config.model.kind == "mce":
        return None
    model = estimator(config, settings)
    model.n_features_in_ = n_features
    return model._start()
