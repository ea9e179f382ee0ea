"""The sections of a config and their keys, as strict types; a key that is absent has the default of the estimator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kme_dist.config.cluster import ClusterConfig, Positive
from kme_dist.config.cluster import Section as _Section

# Keys beside those of the estimator that a run reads for itself.
RUN_KEYS = frozenset(
    {
        "kind",
        "options",
        "starts",
        "threads",
        "mode",
        "local_steps",
        "features",
        "feature_cache",
        "centre_choice",
        "tolerance",
        "tile_rows",
        "memory",
        "batches_per_step",
        "schedule",
        "train_share",
        "checkpoint_steps",
        "checkpoint_seconds",
        "checkpoints_kept",
    }
)
BUILT_IN_TABLES = ("digits", "iris", "wine", "breast_cancer")

Column = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]


class DataConfig(_Section):
    """Where the rows come from, which columns count, and which rows are held out for the test."""

    source: str = Field(
        min_length=1,
        description="`sklearn:digits`, `sklearn:iris`, `sklearn:wine`, `sklearn:breast_cancer`, or "
        "the path of a table (csv, tsv, npz, npy, parquet, libsvm) or of a data set from the current folder",
    )
    label: Column | None = Field(
        default=None,
        description="column of the class labels: its name, or its position counted from 0",
    )
    features: list[Column] | None = Field(
        default=None,
        min_length=1,
        description="columns to use, by name or position; absent: all of them",
    )
    missing: Literal["error", "drop", "mean", "median"] | Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        default=None,
        description="what to do with missing values of a file: error, drop, mean, median or a number to put there",
    )
    test_source: str | None = Field(
        default=None,
        min_length=1,
        description="a second table to test on, instead of holding rows out",
    )
    stored_split: bool = Field(
        default=True,
        description="use the parts `train` and `test` that a data set was ingested with; false divides it again",
    )
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="share of the rows held out for the test"
    )
    split_seed: int = Field(default=0, ge=0, description="seed of the split into training and test rows")
    stratify: bool = Field(default=True, description="keep the same class shares in both parts")
    image_shape: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]] | None = Field(
        default=None,
        strict=False,
        description="[height, width] when the features are pixels of an image",
    )

    @model_validator(mode="after")
    def _known_built_in(self) -> DataConfig:
        for key in ("source", "test_source"):
            prefix, colon, name = (getattr(self, key) or "").partition(":")
            if prefix == "sklearn" and colon and name not in BUILT_IN_TABLES:
                raise ValueError(
                    f"data.{key}: {name!r} is not one of the built-in tables; "
                    f"choose {one_of([f'sklearn:{table}' for table in BUILT_IN_TABLES])}"
                )
        if self.test_source is not None and "test_fraction" in self.model_fields_set:
            raise ValueError(
                "data.test_source and data.test_fraction are both set, but a second table replaces "
                "the held-out rows; remove one of the two"
            )
        return self


class ModelConfig(_Section):
    """What is learned: the kernel, the objective, and where learning starts."""

    kernel: str | dict[str, Any] | None = Field(
        default=None,
        description="name of a kernel, or a mapping such as {name: gaussian, ard: true, length_scale: 1.0, scale: 1.0}",
    )
    objective: Literal["auto", "rcb", "validation", "loo", "erm", "cv", "median"] | None = Field(
        default=None,
        description="the quantity that learning minimises; auto: rcb and validation, the better one is kept",
    )
    risk: Literal["sum", "mean"] | None = Field(
        default=None,
        description="risk summed over the rows of a batch, or averaged",
    )
    complexity_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="weight of the complexity term in the objective"
    )
    regularization: Positive | None = Field(default=None, description="regularisation that learning starts from")
    scaling: Literal["unit", "standard"] | None = Field(
        default=None, description="scaling of the features inside the model; null switches it off"
    )
    backend: Literal["auto", "numpy", "cupy"] | None = Field(default=None, description="where the arrays live")
    dtype: Literal["float32", "float64"] | None = Field(default=None, description="precision of the arithmetic")
    calibration: Literal["none", "temperature", "isotonic"] | None = Field(
        default=None, description="map of the probabilities, fitted to leave-one-out predictions"
    )
    threads: Annotated[int, Field(gt=0)] | None = Field(
        default=1,
        description="threads of the linear algebra; 1 gives the same bits on any machine load, null takes all cores",
    )
    features: str | dict[str, Any] | None = Field(
        default=None,
        description="explicit features that `learn.mode: full` learns instead of a kernel, e.g. "
        "{name: random_fourier, features: 512}",
    )
    kind: Literal["mce", "cen", "askl"] = Field(
        default="mce",
        description="mce (a kernel is learned), cen (a network of features) or askl (frequencies of cosine features)",
    )
    options: dict[str, Any] | None = Field(
        default=None,
        description="further parameters of the estimator of cen and askl, e.g. {hidden: [64, 32]} or {features: 500}",
    )


class Start(_Section):
    """One of several starting points of the learning, compared in the report."""

    name: str = Field(min_length=1, max_length=60, description="its name in the report")
    length_scale: Positive | list[Positive] | None = Field(
        default=None, description="length scale of the kernel at the start"
    )
    regularization: Positive | None = Field(default=None, description="regularisation at the start")


class LearnConfig(_Section):
    """How the gradient steps are taken."""

    steps: int | None = Field(
        default=None, ge=0, description="number of gradient steps; 0 uses the starting point as it is"
    )
    batch_size: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="rows of one batch; null lets the estimator choose"
    )
    learning_rate: Positive | None = Field(default=None, description="size of a step in the log of each parameter")
    optimizer: Literal["adam", "sgd", "momentum", "adadelta"] | None = Field(
        default=None, description="rule that turns gradients into steps"
    )
    seed: int | None = Field(default=None, ge=0, description="seed of the batches")
    mode: Literal["sync", "local", "full"] = Field(
        default="sync",
        description="how learning uses workers: sync (one step with the mean gradient of several batches), local "
        "(replicas make several steps each, then their parameters are averaged) or full (explicit features: the exact "
        "gradient of all rows in every step)",
    )
    local_steps: int = Field(
        default=10, ge=1, description="steps of a replica in `mode: local` before parameters are averaged"
    )
    feature_cache: str = Field(
        default="256MiB",
        min_length=1,
        description="memory of a worker for features that `mode: full` reuses; what does not fit is recomputed",
    )
    batches_per_step: int = Field(
        default=1,
        ge=1,
        description="gradients averaged in one step (`mode: local`: replicas), whatever the number of workers",
    )
    schedule: Literal["constant", "cosine"] = Field(
        default="constant",
        description="learning rate: constant, or cosine decay to 0 at the last step",
    )
    train_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="share of a batch that `objective: validation` trains on (0.5; under `auto` 0.8)"
    )
    checkpoint_steps: int = Field(default=100, ge=1, description="steps between checkpoints")
    checkpoint_seconds: Positive = Field(default=60.0, description="seconds between checkpoints, where steps are slow")
    checkpoints_kept: int = Field(default=3, ge=1, description="number of checkpoints kept on disk")
    starts: list[Start] | None = Field(
        default=None,
        min_length=1,
        description="starting points, learned one after the other and compared; the model with the "
        "lowest objective is kept",
    )

    @model_validator(mode="after")
    def _distinct_names(self) -> LearnConfig:
        names = [start.name for start in self.starts or []]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"learn.starts: two starts are called {twice[0]!r}; give each its own name")
        return self


class FitConfig(_Section):
    """How the final embedding is solved for once the kernel is known."""

    solver: Literal["auto", "cholesky", "tiled", "pcg", "nystrom"] | None = Field(
        default=None, description="method of the final fit; auto chooses by rows, memory and workers"
    )
    centres: Annotated[int, Field(gt=0)] | None = Field(default=None, description="number of centres of nystrom")
    centre_choice: Literal["rpcholesky", "kmeans++", "uniform"] | None = Field(
        default=None, description="how nystrom chooses its centres; null takes rpcholesky"
    )
    tolerance: Positive | None = Field(default=None, description="relative residual that pcg is to reach")
    tile_rows: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="rows of a tile of tiled and pcg; null chooses by the number of rows"
    )
    memory: str | None = Field(
        default=None, min_length=1, description="memory that the fit may take in one worker, e.g. 2GiB"
    )
    refit_regularization: bool | None = Field(
        default=None, description="re-tune the regularisation on all rows after learning"
    )


class PredictConfig(_Section):
    """What `kme-dist predict` computes, from what, and where it goes."""

    model: str | None = Field(default=None, min_length=1, description="saved model; absent: that of the run folder")
    data: str | None = Field(
        default=None, min_length=1, description="data set, or Parquet file or folder; absent: the rows of the run"
    )
    split: str | None = Field(default=None, min_length=1, description="part of the data set; absent: all of it")
    out: str | None = Field(default=None, min_length=1, description="absent: predictions.zarr in the run folder")
    format: Literal["zarr", "parquet"] = Field(default="zarr", description="arrays, or one Parquet file for each chunk")
    outputs: list[Literal["label", "probability", "decision", "entropy", "rkhs_entropy"]] = Field(
        default=["label", "probability", "entropy"], description="what is stored for each row"
    )
    expectations: dict[str, str | list[float] | dict[str, float]] = Field(
        default={},
        description="names, each with values of the classes, or a file that holds them or an expression in y",
    )
    top_k: Annotated[int, Field(gt=0)] | None = Field(default=None, description="number of top classes to store")
    like: str | None = Field(
        default=None, min_length=1, description="data set whose encoding Parquet is read by; absent: that of the run"
    )
    id_column: str | None = Field(default=None, min_length=1, description="column of Parquet to carry through")


class OutputConfig(_Section):
    """Where the results go."""

    folder: str | None = Field(
        default=None, min_length=1, description="run folder; absent: runs/<name of the config file>"
    )
    overwrite: bool = Field(
        default=True,
        description="whether results of other settings or data may be replaced; false refuses",
    )


class Config(_Section):
    """Configuration of `kme-dist run`."""

    data: DataConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    learn: LearnConfig = Field(default_factory=LearnConfig)
    fit: FitConfig = Field(default_factory=FitConfig)
    predict: PredictConfig = Field(default_factory=PredictConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)

    def estimator_arguments(self) -> dict[str, Any]:
        """The keyword arguments of the estimator that this configuration sets, and only those."""
        settings: dict[str, Any] = {}
        for section in (self.model, self.learn, self.fit):
            settings |= {key: getattr(section, key) for key in section.given()}
        for key in RUN_KEYS:
            settings.pop(key, None)
        if "seed" in settings:
            settings["random_state"] = settings.pop("seed")
        return settings

    def resolved(self, estimator_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Everything spelled out: the gaps filled with the estimator's own parameters."""
        full: dict[str, Any] = self.model_dump(mode="json")
        for section in ("model", "learn", "fit"):
            given = getattr(self, section).given()
            for key in set(full[section]) - given - RUN_KEYS:
                parameter = "random_state" if key == "seed" else key
                full[section][key] = estimator_defaults.get(parameter)
        if self.data.test_source is not None:
            del full["data"]["test_fraction"]  # the two exclude each other
        for start in full["learn"].get("starts") or []:
            for key in [key for key, value in start.items() if value is None]:
                del start[key]
        return full


def one_of(choices: Iterable[str]) -> str:
    *most, last = [repr(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last
