"""The configuration of a run: one YAML file, read safely, checked strictly.

    config = load_config("configs/digits.yaml", overrides=["learn.steps=200"])
    config.learn.steps                  # 200
    config.estimator_arguments()        # for MCEClassifier(**...): only the keys that are set
    json_schema()                       # for editors: `kme-dist config-schema`

The file is plain YAML: no tags, no duplicate keys, and `1e-3` is a number. Every mistake is one
`ConfigError` that names the dotted key, what was seen and what is allowed; an unknown key also
names its nearest neighbour. A key that is absent means "the default of the estimator", so that
each default lives in one place.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from kme_dist.config_cluster import ClusterConfig as ClusterConfig
from kme_dist.config_cluster import Positive
from kme_dist.config_cluster import Section as _Section
from kme_dist.config_cluster import TlsConfig as TlsConfig
from kme_dist.errors import ConfigError

MAX_CONFIG_BYTES = 1_000_000
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

_REPR = reprlib.Repr()
_REPR.maxlevel = 2

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
        description="use the parts `train` and `test` that a data set was ingested with, where it has them",
    )
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="share of the rows held out for the test"
    )
    split_seed: int = Field(default=0, ge=0, description="seed of the split into training and test rows")
    stratify: bool = Field(default=True, description="keep the class shares alike in both parts")
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
                    f"data.{key}: {name!r} is no table of scikit-learn that is offered here; "
                    f"choose {_one_of([f'sklearn:{table}' for table in BUILT_IN_TABLES])}"
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
        default=None, description="what the learning steps make small"
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
        "{name: fourier, features: 512}",
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

    name: str = Field(min_length=1, max_length=60, description="how the report calls it")
    length_scale: Positive | list[Positive] | None = Field(
        default=None, description="length scale of the kernel at the start"
    )
    regularization: Positive | None = Field(default=None, description="regularisation at the start")


class LearnConfig(_Section):
    """How the gradient steps are taken."""

    steps: int | None = Field(default=None, ge=0, description="number of gradient steps; 0 keeps the start")
    batch_size: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="rows of one step; null lets the estimator choose"
    )
    learning_rate: Positive | None = Field(default=None, description="size of a step in the log of each parameter")
    optimizer: Literal["adam", "sgd", "momentum", "adadelta"] | None = Field(
        default=None, description="rule that turns gradients into steps"
    )
    seed: int | None = Field(default=None, ge=0, description="seed of the batches")
    mode: Literal["sync", "local", "full"] = Field(
        default="sync",
        description="how `kme-dist learn` uses workers: sync (the mean gradient of some batches makes one step), local "
        "(replicas make some steps of their own, then the mean of them is taken) or full (explicit features: the exact "
        "gradient of all rows in every step)",
    )
    local_steps: int = Field(
        default=10, ge=1, description="steps that a replica makes on its own in `mode: local` before the mean is taken"
    )
    feature_cache: str = Field(
        default="256MiB",
        min_length=1,
        description="memory of a worker for features that `mode: full` needs again; what does not fit is computed anew",
    )
    batches_per_step: int = Field(
        default=1,
        ge=1,
        description="gradients averaged in one step of `kme-dist learn` (`mode: local`: replicas), whatever the number "
        "of workers",
    )
    schedule: Literal["constant", "cosine"] = Field(
        default="constant",
        description="how the learning rate of `kme-dist learn` goes: constant, or down to 0 at the end",
    )
    train_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="share of a batch that `objective: validation` trains on (0.5; under `auto` 0.8)"
    )
    checkpoint_steps: int = Field(default=100, ge=1, description="steps between checkpoints of `kme-dist learn`")
    checkpoint_seconds: Positive = Field(default=60.0, description="seconds between checkpoints, where steps are slow")
    checkpoints_kept: int = Field(default=3, ge=1, description="how many checkpoints stay on disk")
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
    top_k: Annotated[int, Field(gt=0)] | None = Field(default=None, description="so many most probable classes")
    like: str | None = Field(default=None, min_length=1, description="data set whose columns Parquet is read by")
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


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides (the values are YAML too)."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes; is it a data file, not a config?")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = {other.stem: other for other in _yaml_files(path.parent)}
        near = difflib.get_close_matches(path.stem, beside, n=1)
        hint = f"; did you mean {beside[near[0]]}?" if near else ""
        raise ConfigError(f"config file {path} does not exist{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        seen = "nothing" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"{path}: need sections such as `data:` and `model:`, saw {seen}")
    for override in overrides:
        _apply(tree, override)
    return parse_config(tree, str(path))


def parse_config(tree: Mapping[str, Any], where: str = "config") -> Config:
    """Check a mapping against the model; the first mistake becomes a `ConfigError`."""
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        found = error.errors(include_url=False)
        # A misspelt key also makes the right one missing: the misspelling is the news.
        first = min(found, key=lambda item: item["type"] != "extra_forbidden")
        # Each branch of a union reports on its own; together they are one mistake.
        together = [item for item in found if _key(item) == _key(first)]
        raise ConfigError(f"{where}: {_explain(together)}") from None


def json_schema() -> dict[str, Any]:
    """JSON Schema of the configuration, with a description for every key."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


# -------------------------------------------------------------------------------------------------
# YAML


class _Loader(yaml.SafeLoader):
    """Safe YAML that also refuses duplicate keys and reads 1e-3 as the number it looks like."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            problem = None
            if not isinstance(key_node, yaml.ScalarNode):
                problem = "a key must be a plain name"
            elif key_node.value in seen:
                problem = f"key `{key_node.value}` appears twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 wants a dot in the mantissa and a sign in the exponent; YAML 1.2 and people do not.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; `where` opens the message of a `ConfigError`."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = " ".join((error.problem or "cannot be read").split())
        if "could not determine a constructor" in problem:
            tag = problem.rsplit("'", 2)[1]
            problem = f"the tag {tag!r} is refused; use plain values (text, numbers, lists, mappings)"
        raise ConfigError(f"{where}{line}: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as YAML ({' '.join(str(error).split())[:200]})") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` of the command line into the tree read from the file."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: need section.key=value, e.g. --set learn.steps=200")
    target = tree
    for depth, part in enumerate(parts[:-1]):
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            inner = ".".join(parts[: depth + 1])
            raise ConfigError(f"--set {override}: {inner} is {_briefly(target)}, not a mapping; set {inner} as a whole")
    target[parts[-1]] = parse_yaml(text, f"--set {override}")


def _yaml_files(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return []


# -------------------------------------------------------------------------------------------------
# Messages


def _sections() -> dict[str, type[_Section]]:
    return {
        name: field.annotation
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section)
    }


def _known_keys() -> list[str]:
    """Every dotted key that a configuration may hold."""
    keys = []
    for name, section in _sections().items():
        keys += [name, *(f"{name}.{key}" for key in section.model_fields)]
    return [*keys, *(f"learn.starts.{key}" for key in Start.model_fields)]


def _nearest(key: str) -> str:
    """Advice for an unknown dotted key: the nearest one of its section, or of the whole file."""
    known = _known_keys()
    key = re.sub(r"\.\d+\.", ".", key)
    section, _, last = key.rpartition(".")
    prefix = f"{section}." if section else ""
    beside = difflib.get_close_matches(last, _children(section, known), n=1)
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    if beside or elsewhere:
        return f"did you mean `{prefix + beside[0] if beside else elsewhere[0]}`?"
    return f"known here: {', '.join(_children(section, known))}"


def _children(section: str, known: list[str]) -> list[str]:
    prefix = f"{section}." if section else ""
    return [name[len(prefix) :] for name in known if name.startswith(prefix) and "." not in name[len(prefix) :]]


def _explain(findings: list[Any]) -> str:
    """One line from what pydantic says about one key: the key, what was seen, what is allowed."""
    error, key = findings[0], _key(findings[0])
    if error["type"] == "extra_forbidden":
        return f"unknown key `{key}`; {_nearest(key)}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    field = _field(key.split("."))
    meaning = f" ({field.description})" if field is not None and field.description else ""
    if error["type"] == "missing":
        return f"`{key}` is missing{meaning}"
    seen = "nothing" if error["input"] is None else _briefly(error["input"])
    if key in _sections():
        keys = ", ".join(_children(key, _known_keys()))
        return f"`{key}` must be a section with keys {keys}; saw {seen}"
    choices = [str(choice) for choice in _choices(field)]
    if choices:
        near = difflib.get_close_matches(str(error["input"]), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"`{key}` is {seen}, but must be {_one_of(choices)}{hint}"
    if not error["msg"].startswith("Input should be "):
        return f"`{key}` is {seen}: {error['msg']}{meaning}"
    allowed = dict.fromkeys(
        item["msg"].removeprefix("Input should be ").replace("valid dictionary", "mapping") for item in findings
    )
    return f"`{key}` is {seen}, but must be {' or '.join(allowed)}{meaning}"


def _key(error: Any) -> str:
    """Dotted key of a finding, without the names that pydantic gives to branches of a union."""
    parts = [str(part) for part in error["loc"]]
    if error["type"] != "extra_forbidden":
        branch = r"int|float|str|bool|(list|dict|tuple|literal)\[.*|constrained-.*"
        parts = [part for part in parts if not re.fullmatch(branch, part, re.DOTALL)]
    return ".".join(parts)


def _field(path: list[str]) -> Any:
    section = _sections().get(path[0]) if path else None
    if section is None or len(path) < 2:
        return Config.model_fields.get(path[0]) if path else None
    if path[:2] == ["learn", "starts"] and len(path) == 4:
        return Start.model_fields.get(path[3])
    return section.model_fields.get(path[1])


def _choices(field: Any) -> list[Any]:
    """The values of a Literal, however deep it sits in a union."""
    found: list[Any] = []
    pending = [field.annotation] if field is not None else []
    while pending:
        annotation = pending.pop()
        if getattr(annotation, "__origin__", None) is Literal:
            found += get_args(annotation)
        else:
            pending += [part for part in get_args(annotation) if not isinstance(part, str)]
    return found


def _briefly(value: Any) -> str:
    """A value as Python writes it, cut short without ever being written out in full."""
    text = _REPR.repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _one_of(choices: Iterable[str]) -> str:
    *most, last = [repr(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last
