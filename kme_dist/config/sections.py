"""The sections of a config and their keys, as strict types; an absent key has the default of the estimator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kme_dist.config.cluster import ClusterConfig, Positive
from kme_dist.config.cluster import Section as _Section

# Keys of a run that are not parameters of the estimator.
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
        "delay",
        "schedule",
        "train_share",
        "checkpoint_steps",
        "checkpoint_seconds",
        "checkpoints_kept",
    }
)
BUILT_IN_TABLES = ("digits", "iris", "wine", "breast_cancer", "diabetes")

_Missing = Literal["error", "drop", "mean", "median", "indicator"]
Column = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]


class DataConfig(_Section):
    """The source of the rows, the columns to use, and the rows held out for the test."""

    source: str = Field(
        min_length=1,
        description="`sklearn:digits`, `sklearn:iris`, `sklearn:wine`, `sklearn:breast_cancer`, `sklearn:diabetes`, or "
        "the path of a table (csv, tsv, npz, npy, parquet, libsvm) or data set, relative to the current folder",
    )
    label: Column | None = Field(
        default=None,
        description="column of the class labels or numeric targets, by name or position (from 0)",
    )
    task: Literal["auto", "classification", "regression"] = Field(
        default="auto",
        description="the label is a class or a number; auto: fractions, and integers of more than 100 different "
        "values, are numbers (with model.kind cme: all)",
    )
    weight: Column | None = Field(
        default=None,
        description="column of the weights of rows, numbers >= 0: 2 counts as the row twice, 0 as no row; absent: the "
        "weights of a data set, if it has any",
    )
    features: list[Column] | None = Field(
        default=None,
        min_length=1,
        description="columns to use, by name or position; absent: all",
    )
    exclude: list[Column] | None = Field(
        default=None, min_length=1, description="columns to leave out, by name or position"
    )
    missing: (
        Literal["error", "drop", "mean", "median", "indicator"] | Annotated[float, Field(allow_inf_nan=False)] | None
    ) = Field(
        default=None,
        description="how to handle missing values of a file: error, drop, mean, median, indicator (the mean, and a "
        "further feature that is 1 where the value is missing), or a number to fill in; absent: indicator for tables "
        "(csv, parquet), error for matrices (npy, npz, libsvm)",
    )
    categories: list[Column] | None = Field(
        default=None,
        min_length=1,
        description="columns that are categories whatever their values look like (007, or 1,5), by name or position",
    )
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = Field(
        default=None, description="field delimiter of a csv file; absent: from its first lines"
    )
    header: bool | None = Field(
        default=None,
        description="whether the first line of a csv file names the columns; absent: yes, unless it contains a number",
    )
    encoding: str | None = Field(default=None, min_length=1, description="encoding of a csv file; absent: utf-8")
    decimal: Literal[".", ","] | None = Field(
        default=None, description="decimal sign of numbers in a csv file, or in texts of a table; absent: ."
    )
    thousands: Literal[",", ".", "_", "'", " "] | None = Field(
        default=None, description="separator between the thousands of numbers; absent: none"
    )
    percent: bool | None = Field(default=None, description="read texts such as 10% as numbers, here 0.1")
    strip: bool | None = Field(
        default=None,
        description="remove spaces around texts; absent: texts that differ by them only are an error",
    )
    test_source: str | None = Field(
        default=None,
        min_length=1,
        description="a second table to test on, instead of held-out rows",
    )
    stored_split: bool = Field(
        default=True,
        description="use the splits `train` and `test` that are stored with a data set; false splits it again",
    )
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="fraction of the rows held out for the test"
    )
    split_seed: int = Field(default=0, ge=0, description="seed of the split into training and test rows")
    stratify: bool = Field(default=True, description="keep the class proportions in both splits")
    image_shape: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]] | None = Field(
        default=None,
        strict=False,
        description="[height, width] if the features are pixels of an image",
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
                "the held-out rows; remove one of them"
            )
        return self


class ModelConfig(_Section):
    """What is learned: the kernel, the objective, and the starting point."""

    kernel: str | dict[str, Any] | None = Field(
        default=None,
        description="name of a kernel, auto (Gaussian or Matérn, by leave-one-out), or a mapping such as "
        "{name: gaussian, ard: true, length_scale: 1.0, scale: 1.0}",
    )
    objective: Literal["auto", "rcb", "validation", "loo", "erm", "calibrated", "cv", "median"] | None = Field(
        default=None,
        description="the quantity that learning minimises; auto: calibrated, then the best of several kernels by "
        "leave-one-out on a sample",
    )
    risk: Literal["sum", "mean"] | None = Field(
        default=None,
        description="risk summed over the rows of a batch, or averaged",
    )
    complexity_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="weight of the complexity term in the objective"
    )
    regularization: Positive | None = Field(default=None, description="initial regularisation")
    scaling: Literal["auto", "unit", "standard"] | None = Field(
        default=None,
        description="scaling of the features inside the model; auto: as suits the model, and normal scores "
        "for features with heavy tails where they lower the error; null: none",
    )
    backend: Literal["auto", "numpy", "cupy"] | None = Field(default=None, description="numpy (CPU) or cupy (GPU)")
    dtype: Literal["float32", "float64"] | None = Field(default=None, description="precision of the arithmetic")
    calibration: Literal["auto", "none", "temperature", "softmax", "isotonic"] | None = Field(
        default=None, description="calibration of the probabilities, fitted to training rows that were left out"
    )
    class_weight: Literal["balanced"] | dict[str | int | float, float] | None = Field(
        default=None, description="weights of classes: balanced, or a mapping from label to a number >= 0"
    )
    threads: Annotated[int, Field(gt=0)] | None = Field(
        default=1,
        description="BLAS threads; 1: the same bits on any machine, null: all cores",
    )
    features: str | dict[str, Any] | None = Field(
        default=None,
        description="spectral: features learned on all rows instead of a kernel; or explicit features that "
        "`learn.mode: full` learns, e.g. {name: random_fourier, features: 512}",
    )
    kind: Literal["mce", "cen", "askl", "cme"] = Field(
        default="mce",
        description="mce (learns a kernel), cen (a feature network) or askl (frequencies of cosine features); cme for "
        "regression, the default where the label is a number",
    )
    options: dict[str, Any] | None = Field(
        default=None,
        description="additional parameters of the cen or askl estimator, e.g. {hidden: [64, 32]} or {features: 500}",
    )


class Start(_Section):
    """One of several starting points, compared in the report."""

    name: str = Field(min_length=1, max_length=60, description="name in the report")
    length_scale: Positive | list[Positive] | None = Field(
        default=None, description="initial length scale of the kernel"
    )
    regularization: Positive | None = Field(default=None, description="initial regularisation")


class LearnConfig(_Section):
    """How the gradient steps are taken."""

    steps: int | None = Field(
        default=None, ge=0, description="number of gradient steps; 0: use the starting point as it is"
    )
    batch_size: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="rows per batch; null: chosen by the estimator"
    )
    learning_rate: Positive | None = Field(default=None, description="learning rate, in the log of each parameter")
    optimizer: Literal["adam", "sgd", "momentum", "adadelta"] | None = Field(default=None, description="optimiser")
    seed: int | None = Field(default=None, ge=0, description="seed of the batches")
    mode: Literal["sync", "local", "full"] = Field(
        default="sync",
        description="how workers are used: sync (a step with the mean gradient of several batches), local "
        "(replicas take several steps each, then their parameters are averaged) or full (explicit features: the exact "
        "gradient of all rows in every step)",
    )
    local_steps: int = Field(default=10, ge=1, description="`mode: local`: steps of a replica between averages")
    feature_cache: str = Field(
        default="256MiB",
        min_length=1,
        description="`mode: full`: memory per worker to cache features; those that do not fit are recomputed",
    )
    batches_per_step: int = Field(
        default=1,
        ge=1,
        description="gradients averaged per step (`mode: local`: replicas), independent of the number of workers",
    )
    delay: Literal[0, 1] = Field(
        default=0,
        description="`mode: sync`: 1 sends a step before the last one is collected, so that workers never wait; "
        "gradients are then one update old",
    )
    schedule: Literal["constant", "cosine"] = Field(
        default="constant",
        description="learning rate: constant, or cosine decay to 0 at the last step",
    )
    train_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="fraction of a batch that `objective: validation` trains on (0.5)",
    )
    checkpoint_steps: int = Field(default=100, ge=1, description="steps between checkpoints")
    checkpoint_seconds: Positive = Field(default=60.0, description="seconds between checkpoints, for slow steps")
    checkpoints_kept: int = Field(default=3, ge=1, description="number of checkpoints kept on disk")
    starts: list[Start] | None = Field(
        default=None,
        min_length=1,
        description="starting points, learned one after another and compared; the model with the "
        "lowest objective is kept",
    )

    @model_validator(mode="after")
    def _distinct_names(self) -> LearnConfig:
        names = [start.name for start in self.starts or []]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"learn.starts: the name {twice[0]!r} is used twice; names must be unique")
        return self


class FitConfig(_Section):
    """How the final embedding is fitted with the learned kernel."""

    solver: Literal["auto", "cholesky", "tiled", "pcg", "nystrom", "falkon"] | None = Field(
        default=None, description="solver of the final fit; auto: exact if affordable, else as many centres as are"
    )
    centres: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="nystrom and falkon: number of centres"
    )
    centre_choice: Literal["rpcholesky", "leverage", "kmeans++", "uniform"] | None = Field(
        default=None, description="how centres are chosen; null: rpcholesky, above 4,000 centres leverage"
    )
    tolerance: Positive | None = Field(default=None, description="pcg: relative residual to reach")
    tile_rows: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="tiled and pcg: rows per tile; null: chosen by the number of rows"
    )
    memory: str | None = Field(default=None, min_length=1, description="memory limit of the fit per worker, e.g. 2GiB")
    fit_seconds: Positive | None = Field(
        default=None,
        description="auto: processor seconds of the solve, as measured here; null: the same work on every machine",
    )
    refit_regularization: bool | None = Field(
        default=None, description="re-tune the regularisation on all rows after learning"
    )


class PredictConfig(_Section):
    """Model, data, outputs and destination of `kme-dist predict`."""

    model: str | None = Field(default=None, min_length=1, description="saved model; absent: that of the run folder")
    data: str | None = Field(
        default=None,
        min_length=1,
        description="data set, Parquet file or folder, CSV or npy file; absent: the test rows of the run",
    )
    split: str | None = Field(default=None, min_length=1, description="split of the data set; absent: all rows")
    out: str | None = Field(
        default=None,
        min_length=1,
        description="destination; absent: predictions.zarr in the run folder, with predict.data data-predictions.zarr",
    )
    format: Literal["zarr", "parquet", "csv"] | None = Field(
        default=None,
        description="Zarr arrays, one Parquet file per chunk, or one CSV file; absent: by the name of the destination",
    )
    outputs: list[Literal["label", "probability", "decision", "entropy", "rkhs_entropy", "mean", "std", "interval"]] = (
        Field(
            default=["label", "probability", "entropy"],
            description="outputs stored for each row; of a regressor mean, std and interval (all three by default)",
        )
    )
    coverage: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.9, description="of the intervals of a regressor: share of new targets inside"
    )
    expectations: dict[str, str | list[float] | dict[str, float]] = Field(
        default={},
        description="names, each with one value per class, a file with them, or an expression in y",
    )
    top_k: Annotated[int, Field(gt=0)] | None = Field(default=None, description="number of top classes to store")
    like: str | None = Field(
        default=None, min_length=1, description="data set whose encoding is used for files; absent: that of the model"
    )
    unseen: Literal["zeros", "error"] = Field(
        default="zeros",
        description="categories that training rows did not have: none of the known ones (zeros), or an error",
    )
    id_column: str | None = Field(
        default=None, min_length=1, description="column of a CSV or Parquet file to copy to the predictions"
    )
    on_model_change: Literal["refuse", "recompute", "new-folder"] = Field(
        default="refuse",
        description="predictions of an earlier model at the destination: an error, replaced, or kept beside new ones",
    )


class OutputConfig(_Section):
    """Where the results go."""

    folder: str | None = Field(
        default=None, min_length=1, description="run folder; absent: runs/<name of the config file>"
    )
    overwrite: bool = Field(
        default=True,
        description="whether to replace results of other settings or data",
    )
    baselines: bool = Field(
        default=True,
        description="whether the report compares with simple models that learn from a sample of the rows",
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
        """The keyword arguments of the estimator that this configuration sets."""
        settings: dict[str, Any] = {}
        for section in (self.model, self.learn, self.fit):
            settings |= {key: getattr(section, key) for key in section.given()}
        for key in RUN_KEYS:
            settings.pop(key, None)
        if "seed" in settings:
            settings["random_state"] = settings.pop("seed")
        return settings

    def resolved(self, estimator_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Every key with its value: absent ones filled with the estimator's defaults."""
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
