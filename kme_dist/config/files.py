"""From a YAML file to a checked `Config`: reading, overrides, and messages that name the key and the fix."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import ValidationError

from kme_dist.config.cluster import Section
from kme_dist.config.sections import Config, Start, one_of
from kme_dist.errors import ConfigError

MAX_CONFIG_BYTES = 1_000_000
_REPR = reprlib.Repr()
_REPR.maxlevel = 2


def load_config(path: str | Path, overrides: Iterable[str] = (), flags: Iterable[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides (the values are YAML too).

    `flags` are overrides by other options of the command line than --set, applied last.
    """
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
        raise ConfigError(f"{path}: expected sections such as `data:` and `model:`, got {seen}")
    origins = {}  # of keys that are not from the file; the last override of a key wins
    for override in overrides:
        origins[_apply(tree, override)] = f"--set {override if len(override) <= 80 else override[:77] + '...'}"
    for flag in flags:
        origins[_apply(tree, flag)] = "command line"
    return parse_config(tree, str(path), origins)


def parse_config(tree: Mapping[str, Any], where: str = "config", origins: Mapping[str, str] | None = None) -> Config:
    """Check a mapping against the model; the first mistake becomes a `ConfigError`.

    Its message begins with `where`, or with the origin of the dotted key in `origins`.
    """
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        found = error.errors(include_url=False)
        # A misspelt key also makes the right one missing; report the misspelling.
        first = min(found, key=lambda item: item["type"] != "extra_forbidden")
        # Each branch of a union reports an error; together they are one mistake.
        together = [item for item in found if _key(item) == _key(first)]
        problem = _explain(together)
        raise ConfigError(f"{_origin(first, problem, origins or {}) or where}: {problem}") from None


def json_schema() -> dict[str, Any]:
    """JSON Schema of the configuration, with a description for every key."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


# -------------------------------------------------------------------------------------------------
# YAML


# Values of the core schema of YAML 1.2, section 10.3.2, with their first characters. PyYAML knows YAML 1.1, where 010
# is 8, 1:30 is 90, and `no` is false.
_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """Safe YAML: values of the core schema of YAML 1.2, keys as they are written, none of them twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as PyYAML declares it

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "expected a mapping", node.start_mark)
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            problem = None
            if not isinstance(key_node, yaml.ScalarNode):
                problem = "a key must be a plain name"
            elif key_node.value in found:
                problem = f"key `{key_node.value}` appears twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            found[key_node.value] = self.construct_object(value_node, deep=deep)
        return found

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text[2:], 8 if text[1] == "o" else 16) if text[:2] in ("0o", "0x") else int(text)

    def construct_decimal(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node).lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Quotes texts that either version of YAML would read as something else."""

    yaml_implicit_resolvers: dict[str, Any] = {  # noqa: RUF012
        first: [*found] for first, found in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


for _name, _pattern, _firsts in _CORE:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _firsts)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_decimal)


def dump_yaml(value: Any, **style: Any) -> str:
    """Plain data as YAML that `parse_yaml` reads back."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style))


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; `where` is the prefix of error messages."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = " ".join((error.problem or "cannot be read").split())
        if "could not determine a constructor" in problem:
            tag = problem.rsplit("'", 2)[1]
            problem = f"the tag {tag!r} is not allowed; use plain values (text, numbers, lists, mappings)"
        raise ConfigError(f"{where}{line}: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as YAML ({' '.join(str(error).split())[:200]})") from None


def _apply(tree: dict[str, Any], override: str) -> str:
    """Put one `section.key=value` of the command line into the tree read from the file; returns the key."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: must be section.key=value, e.g. --set learn.steps=200")
    target = tree
    for depth, part in enumerate(parts[:-1]):
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            inner = ".".join(parts[: depth + 1])
            raise ConfigError(f"--set {override}: {inner} is {_briefly(target)}, not a mapping; set {inner} as a whole")
    target[parts[-1]] = parse_yaml(text, f"--set {override}")
    return ".".join(parts)


def _yaml_files(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return []


# -------------------------------------------------------------------------------------------------
# Messages


def _sections() -> dict[str, type[Section]]:
    return {
        name: field.annotation
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def _known_keys() -> list[str]:
    """Every dotted key of the configuration."""
    keys = []
    for name, section in _sections().items():
        keys += [name, *(f"{name}.{key}" for key in section.model_fields)]
    return [*keys, *(f"learn.starts.{key}" for key in Start.model_fields)]


def _nearest(key: str) -> str:
    """A hint for an unknown dotted key: the nearest one of its section, or of the whole file."""
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
    """One line for pydantic's errors of one key: the key, the value found, the values allowed."""
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
        return f"`{key}` must be a section with keys {keys}; got {seen}"
    choices = [str(choice) for choice in _choices(field)]
    if choices:
        near = difflib.get_close_matches(str(error["input"]), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"`{key}` is {seen}, but must be {one_of(choices)}{hint}"
    if not error["msg"].startswith("Input should be "):
        return f"`{key}` is {seen}: {error['msg']}{meaning}"
    allowed = dict.fromkeys(
        item["msg"].removeprefix("Input should be ").replace("valid dictionary", "mapping") for item in findings
    )
    return f"`{key}` is {seen}, but must be {' or '.join(allowed)}{meaning}"


def _origin(error: Any, problem: str, origins: Mapping[str, str]) -> str | None:
    """Where the wrong key was given, if not in the file."""
    wrong = _key(error)
    for key, origin in reversed(list(origins.items())):
        if f"{wrong}.".startswith(f"{key}."):
            return origin
        if error["type"] == "extra_forbidden" and key.startswith(f"{wrong}."):  # an unknown section
            return origin
        if error["type"] == "value_error" and re.search(rf"{re.escape(key)}\b", problem):  # found in a whole section
            return origin
    return None


def _key(error: Any) -> str:
    """Dotted key of an error, without the names that pydantic gives to branches of a union."""
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
    """The values of a Literal at any depth of a union."""
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
    """The repr of a value, truncated without building it in full."""
    text = _REPR.repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
