"""From a config to the recipe of learning and fitting: the only place where its sections become settings.

    check(config)                                             # an error for incompatible keys
    for start in starts_of(config, n_features):               # one, or those of `learn.starts`
        recipe = recipe_of(config, start.settings, data)      # of model.kind mce: see `kme_dist.run.train`
        model = estimator_of(config, start.settings)          # of any kind

    model:
      kind: cen
      options: {hidden: [64, 32]}       # parameters of CENClassifier without a key in the sections

The sections have the same meaning for every kind of model (`learn.steps`, `model.scaling`, ...); `options` holds the
other parameters of the estimator. An absent key has the default of the estimator.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kme_dist import ASKLClassifier, CENClassifier, CMERegressor, MCEClassifier, kernels
from kme_dist.config import Config, FitConfig, LearnConfig, ModelConfig, Start
from kme_dist.core import features as maps
from kme_dist.core.optim import cosine_decay
from kme_dist.data.dataset import RowSource
from kme_dist.data.ingest import parse_bytes
from kme_dist.errors import ConfigError
from kme_dist.ops.cluster import backend_of
from kme_dist.run.executors import Executor
from kme_dist.run.spectral import NAME as SPECTRAL
from kme_dist.run.train import Recipe

KINDS: dict[str, Any] = {"mce": MCEClassifier, "cen": CENClassifier, "askl": ASKLClassifier, "cme": CMERegressor}
REGRESSION = "cme"
SECTIONS: dict[str, Any] = {"model": ModelConfig, "learn": LearnConfig, "fit": FitConfig}
NOT_OPTIONS = ("client", "n_jobs", "verbose")
FULL_OBJECTIVES = ("rcb", "erm")  # objectives with exact gradients over all rows
NOT_WITH_SPECTRAL = {
    "model": ("kernel", "objective", "scaling", "regularization", "risk", "complexity_weight"),
    "learn": (
        "mode",
        "steps",
        "batch_size",
        "learning_rate",
        "optimizer",
        "schedule",
        "train_share",
        "starts",
        "delay",
    ),
    "fit": ("solver", "centres", "centre_choice"),
}
ROWS_TO_REHEARSE = 20  # of each class


@dataclass(frozen=True)
class StartingPoint:
    """A starting point: the parameters of the estimator; one of several has its own folder in the run folder."""

    name: str
    settings: dict[str, Any]
    folder: str = ""

    @property
    def as_given(self) -> dict[str, Any]:
        """The same starting point without learning, for comparison."""
        return {**self.settings, "steps": 0, "refit_regularization": False}


# --- checks ---------------------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raise an error for incompatible keys, before anything is read or written."""
    if config.model.kind == "mce":
        _check_kernel(config)
    elif config.model.kind == REGRESSION:
        _check_regressor(config)
    else:
        _check_network(config)
    _bytes("learn.feature_cache", config.learn.feature_cache)
    if config.fit.memory is not None:
        _bytes("fit.memory", config.fit.memory)


def _check_kernel(config: Config) -> None:
    learn, objective = config.learn, config.model.objective
    if config.model.features == SPECTRAL:
        _check_spectral(config)
    if config.model.options:
        raise ConfigError("model.options requires model.kind cen or askl; set the keys of the sections for mce")
    if learn.mode == "full":
        if objective is not None and objective not in FULL_OBJECTIVES:
            raise ConfigError(f"learn.mode is full: model.objective must be rcb or erm, not {objective!r}")
        if not has_given_features(config):
            raise ConfigError(
                "learn.mode is full: model.features is missing, e.g. {name: random_fourier, features: 512}; it learns "
                "explicit features; for kernels use sync or local"
            )
        if learn.starts:
            raise ConfigError("learn.starts is only for kernels; remove it with learn.mode full")
    elif has_given_features(config):
        raise ConfigError(
            f"model.features is {config.model.features!r} and learn.mode is {learn.mode}; features learned on all rows "
            "are spectral; explicit features require learn.mode full, or model.kind cen with options: {network: ...}"
        )
    if learn.delay and learn.mode != "sync":
        raise ConfigError(
            f"learn.delay is {learn.delay}, which requires learn.mode sync, not {learn.mode}: remove it"
            + ("; for fewer rounds raise learn.local_steps" if learn.mode == "local" else "")
        )
    steps = MCEClassifier().steps if learn.steps is None else learn.steps
    if learn.mode == "local" and steps % learn.local_steps:
        raise ConfigError(
            f"learn.steps is {steps}, which is not a multiple of learn.local_steps {learn.local_steps}: "
            "parameters are averaged after whole rounds"
        )


def _check_spectral(config: Config) -> None:
    """Rates, batches and steps of spectral features follow from the number of rows."""
    for section, keys in NOT_WITH_SPECTRAL.items():
        given = getattr(config, section).given()
        for key in (key for key in keys if key in given):
            raise ConfigError(f"model.features is spectral, which has no {section}.{key}; remove it")


def settled(config: Config) -> Config:
    """The config with the task that follows from the kind of model, and the kind that follows from the task."""
    kind, task = config.model.kind, config.data.task
    given = "kind" in config.model.model_fields_set
    if kind == REGRESSION and task == "classification":
        raise ConfigError("model.kind is cme, which predicts numbers, and data.task is classification; remove one")
    if kind == REGRESSION and task == "auto":
        return _changed(config, "data", task="regression")
    if kind != REGRESSION and task == "regression":
        if given:
            raise ConfigError(f"data.task is regression, and model.kind {kind} predicts classes; set model.kind: cme")
        return _changed(config, "model", kind=REGRESSION)
    return config


def settled_for(config: Config, numeric: bool, label: str) -> tuple[Config, str]:
    """The same once it is known whether labels are numbers; and what was assumed, in a line ("": nothing)."""
    if not numeric:
        if config.model.kind == REGRESSION:
            raise ConfigError(
                f"model.kind is cme, which predicts numbers, but the label {label!r} is stored as classes; ingest the "
                "table again with --task regression"
            )
        return config, ""
    if config.model.kind == REGRESSION:
        return config, ""
    if config.data.task == "classification":
        raise ConfigError(
            f"data.task is classification, but the label {label!r} is stored as numbers; ingest the table again with "
            "--task classification, or remove data.task"
        )
    if "kind" in config.model.model_fields_set:
        raise ConfigError(
            f"model.kind {config.model.kind} predicts classes, but the label {label!r} is a number; set data.task: "
            "classification if its values are classes, or model.kind: cme"
        )
    changed = _changed(config, "model", kind=REGRESSION)
    check(changed)
    return changed, (
        f"the label {label!r} is a number: regression (model.kind cme); set data.task: classification if its values "
        "are classes"
    )


def _changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _check_regressor(config: Config) -> None:
    if config.model.features is not None or config.model.options:
        raise ConfigError("model.features and model.options are not for model.kind cme; remove them")
    if config.learn.starts or config.learn.mode != "sync":
        raise ConfigError("learn.starts, and learn.mode other than sync, are not for model.kind cme; remove them")
    known = set(CMERegressor().get_params())
    for key in config.estimator_arguments():
        if key not in known:
            section = next(name for name, fields in SECTIONS.items() if key in fields.model_fields)
            raise ConfigError(f"{section}.{key} is not supported with model.kind cme; remove it")


def has_given_features(config: Config) -> bool:
    """Whether model.features is a map for learn.mode full; `spectral` is learned by steps, as kernels are."""
    return config.model.features not in (None, SPECTRAL)


def _check_network(config: Config) -> None:
    kind = config.model.kind
    if config.model.features is not None:
        instead = "options: {network: ...}" if kind == "cen" else "options: {features: 500}"
        raise ConfigError(f"model.features requires model.kind mce; for {kind} use {instead}")
    if config.learn.starts:
        raise ConfigError(f"learn.starts is only for kernels; remove it with model.kind {kind!r}")
    if config.learn.mode != "sync":
        raise ConfigError(
            f"learn.mode is {config.learn.mode!r}: remove it with model.kind {kind!r}; without "
            "learn.batch_size a network uses the exact gradient of all rows"
        )
    if config.learn.delay:
        raise ConfigError(f"learn.delay is only for kernels; remove it with model.kind {kind!r}")
    _network_settings(config)


def _bytes(key: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise ConfigError(f"{key} is {text!r}; it must be a size such as 256MiB") from None


# --- settings -------------------------------------------------------------------------------------------------


def starts_of(config: Config, n_features: int) -> list[StartingPoint]:
    """The parameters of the estimator for every starting point."""
    if config.model.kind not in ("mce", REGRESSION):
        return [StartingPoint("", _network_settings(config))]
    settings = config.estimator_arguments()
    if config.model.features == SPECTRAL:
        settings["features"] = SPECTRAL
    if config.learn.mode == "full":
        settings.setdefault("objective", FULL_OBJECTIVES[0])
    if settings.get("kernel") not in (None, "auto"):
        settings["kernel"] = kernels.from_config(settings["kernel"], n_features=n_features)
    if not config.learn.starts:
        return [StartingPoint("", settings)]
    return [
        StartingPoint(start.name, {**settings, **_changes(config, start, n_features)}, f"starts/{number}")
        for number, start in enumerate(config.learn.starts)
    ]


def _changes(config: Config, start: Start, n_features: int) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if start.regularization is not None:
        changes["regularization"] = start.regularization
    if start.length_scale is not None:
        kernel: Any = config.model.kernel or "auto"
        kernel = "gaussian" if kernel == "auto" else kernel  # a given length scale is that of a given kernel
        settings = {"name": kernel, "ard": True} if isinstance(kernel, str) else kernel
        changes["kernel"] = kernels.from_config({**settings, "length_scale": start.length_scale}, n_features=n_features)
    return changes


def _network_settings(config: Config) -> dict[str, Any]:
    """The parameters of a CENClassifier or ASKLClassifier that the config sets."""
    kind, options = config.model.kind, dict(config.model.options or {})
    known = set(KINDS[kind]().get_params()) - set(NOT_OPTIONS)
    owners = {key: f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields}
    del owners["features"]  # of askl it is how many
    owners["random_state"] = "learn.seed"
    free = sorted(known - set(owners))
    for key in options:
        if key in owners:
            raise ConfigError(f"model.options.{key}: use {owners[key]} instead")
        if key not in known:
            near = difflib.get_close_matches(key, free, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(free)}"
            raise ConfigError(f"model.options.{key} is unknown with model.kind {kind!r}; {hint}")
    given = config.estimator_arguments()
    given |= {k: getattr(config.learn, k) for k in ("schedule", "batches_per_step") if k in config.learn.given()}
    for key in given:
        if key not in known:
            raise ConfigError(f"{owners[key]} is not supported with model.kind {kind!r}; options: {', '.join(free)}")
    if kind == "askl" and options.setdefault("loss", "cross_entropy") != "cross_entropy":
        raise ConfigError(
            f"model.options.loss is {options['loss']!r}: a run reports probabilities, which require cross_entropy"
        )
    if "hidden" in options:
        options["hidden"] = tuple(options["hidden"])
    return {**given, **options}


def estimator_of(config: Config, settings: Mapping[str, Any], **further: Any) -> Any:
    """An unfitted estimator of model.kind."""
    return KINDS[config.model.kind](**{**settings, **further})


def resolved(config: Config) -> dict[str, Any]:
    """The config with all defaults filled in."""
    if config.model.kind == "mce":
        full = config.resolved(MCEClassifier().get_params())
        if config.learn.mode == "full":
            full["model"]["objective"] = config.model.objective or FULL_OBJECTIVES[0]
        return full
    if config.model.kind == REGRESSION:
        return config.resolved(CMERegressor().get_params())
    model = estimator_of(config, _network_settings(config))
    full = config.resolved(model.get_params())
    full["learn"] |= {key: getattr(model, key) for key in ("schedule", "batches_per_step")}
    return full


# --- recipes --------------------------------------------------------------------------------------------------


def recipe_of(config: Config, settings: Mapping[str, Any], data: RowSource, executor: Executor | None = None) -> Recipe:
    """The recipe of the estimator with these settings, and the additional settings of a config.

    The workers of `executor` determine whether arrays are on the CPU or the GPU; without an executor, the CPU.
    """
    own = {} if config.model.kind == REGRESSION else {"backend": "numpy"}
    model = KINDS[config.model.kind](**{**settings, **own})
    learn, fit = config.learn, config.fit
    further = {key: getattr(fit, key) for key in ("centre_choice", "tolerance", "tile_rows")}
    if fit.memory is not None:
        further["memory"] = _bytes("fit.memory", fit.memory)
    return replace(
        model.recipe(data),
        batches_per_step=learn.batches_per_step,
        local_steps=learn.local_steps if learn.mode == "local" else None,
        delay=learn.delay,
        schedule=cosine_decay if learn.schedule == "cosine" else None,
        train_share=learn.train_share,
        backend="numpy" if executor is None else backend_of(executor, settings.get("backend", "auto")),
        fit={key: value for key, value in further.items() if value is not None},
    )


def feature_map_of(config: Config, n_features: int) -> Any:
    """The initial explicit features of `learn.mode: full`; None if a kernel is learned."""
    if not has_given_features(config):
        return None
    seed = 0 if config.learn.seed is None else config.learn.seed
    found = maps.from_config(config.model.features, n_features=n_features, seed=seed)
    if not found.parameters:
        raise ConfigError(f"model.features {config.model.features!r} has no parameters to learn")
    return found


def cache_bytes_of(config: Config) -> int:
    return _bytes("learn.feature_cache", config.learn.feature_cache)


def rehearse(config: Config, X: np.ndarray, y: np.ndarray) -> None:
    """One step on a few rows, to find invalid settings before anything stored is changed."""
    if config.model.features is not None:
        return
    if config.model.kind == REGRESSION:
        for start in starts_of(config, X.shape[1]):
            estimator_of(config, start.settings, solver="auto", centres=None, steps=0).fit(X[:100], y[:100])
        return
    few = np.concatenate([np.flatnonzero(y == label)[:ROWS_TO_REHEARSE] for label in np.unique(y)])
    if len(np.unique(y[few])) < 2:
        return
    for start in starts_of(config, X.shape[1]):
        model = estimator_of(config, start.settings, backend="auto")  # this machine may lack the GPUs of the workers
        if config.model.kind == "mce":
            model.set_params(steps=min(model.steps, 1), solver="auto", centres=None)
        elif config.model.kind == "cen":
            model.set_params(steps=min(model.steps, 1))
        else:
            model.set_params(epochs=1)
        model.fit(X[few], y[few])


def initial_features(config: Config, settings: Mapping[str, Any], n_features: int) -> Any:
    """The feature map before learning, for plots of the changes; None if a kernel is learned."""
    if config.model.kind in ("mce", REGRESSION):
        return None
    model = estimator_of(config, settings)
    model.n_features_in_ = n_features
    return model._start()
