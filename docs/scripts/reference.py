"""Reference pages that are generated from the program itself, so that they cannot differ from it.

    config_page()     every key of the config file, from its schema
    commands_page()   every command and option, from the parser of the command line
    python_page()     every public name, from its signature and docstring
    kernels_page()    every kernel

`python -m docs.scripts.reference NAME` prints one of them (config, commands, python, kernels).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import typer

import kme_dist as kme
from kme_dist.cli import app as cli
from kme_dist.config.files import json_schema

# The public names by subject; a test compares this with kme_dist.__all__.
SUBJECTS = {
    "Classifiers": ["MCEClassifier", "CENClassifier", "ASKLClassifier", "ParzenClassifier", "SupportMeasureClassifier"],
    "Regression and conditional distributions": ["CMERegressor", "ASKLRegressor", "ConditionalMeanEmbedding"],
    "Means of distributions": ["KernelMean", "OneClassSupportMeasure", "MixtureMatching"],
    "Tests": ["mmd_test", "MMDTest", "hsic_test", "conditional_independence_test", "IndependenceTest"],
    "Kernel Bayes": ["bayes", "KernelBayesFilter"],
    "Data and predictions": [
        "ingest", "read_table", "Table", "open_dataset", "Dataset",
        "predict", "open_predictions", "Predictions", "load",
    ],
    "Displays": ["RelevanceDisplay", "ReliabilityDisplay", "LearningCurveDisplay"],
    "The core: objectives with closed-form gradients": [
        "rcb_objective", "validation_objective", "loo_objective", "feature_objective", "Objective",
    ],
    "Kernels and errors": ["kernels", "errors"],
}  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Config


def config_page() -> str:
    """The keys of every section as tables: name, type, default, meaning."""
    schema = json_schema()
    lines = [
        "# Config file",
        "",
        "Generated from the schema, which `kme-dist config-schema` prints as JSON Schema for editors and validators.",
        "A config is one YAML file with these sections; `--set section.key=value` overrides a key. Unknown keys are",
        "refused, and the message names the nearest known one. An absent key has the default shown; where none is",
        "shown it is that of the [estimator](python.md).",
        "",
    ]
    for name, field in schema["properties"].items():
        section = _resolve(schema, field)
        required = " (required)" if name in schema.get("required", []) else ""
        lines += [f"## {name}{required}", "", _sentence(section.get("description", "")), ""]
        if "properties" in section:
            lines += [*_key_table(schema, section, name), ""]
    return "\n".join(lines)


def _key_table(schema: dict[str, Any], section: dict[str, Any], prefix: str) -> Iterator[str]:
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    nested = []
    for key, field in section["properties"].items():
        required = key in section.get("required", [])
        default = "required" if required else _value(field.get("default"))
        meaning = _cell(field.get("description", ""))
        yield f"| `{key}` | {_type(schema, field)} | {default} | {meaning} |"
        nested += [(key, inner) for inner in _sections_within(schema, field)]
    for key, inner in nested:
        yield ""
        yield f"### {prefix}.{key}"
        yield ""
        yield _sentence(inner.get("description", ""))
        yield ""
        yield from _key_table(schema, inner, f"{prefix}.{key}")


def _resolve(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in field:
        field = {**schema["$defs"][field["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in field.items() if k != "$ref"}}
    for choice in field.get("anyOf", []):
        if "$ref" in choice:
            return _resolve(schema, choice)
    return field


def _sections_within(schema: dict[str, Any], field: dict[str, Any]) -> list[dict[str, Any]]:
    """Sections that a key holds: itself, one of its alternatives, or the items of its list."""
    parts = [field, *field.get("anyOf", [])]
    parts += [part["items"] for part in parts if "items" in part]
    found = [_resolve(schema, part) for part in parts if "$ref" in part]
    return [inner for inner in found if "properties" in inner]


def _type(schema: dict[str, Any], field: dict[str, Any]) -> str:
    if "anyOf" in field:
        parts = [_type(schema, part) for part in field["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "$ref" in field:
        inner = _resolve(schema, field)
        return "section" if "properties" in inner else _type(schema, inner)
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = field.get("type", "any value")
    if kind == "array":
        if "prefixItems" in field:
            return f"list of {len(field['prefixItems'])} numbers"
        return f"list of {_type(schema, field['items'])}" if field.get("items") else "list"
    if kind == "object":
        return "mapping"
    words = {"string": "text", "boolean": "true, false"}.get(kind, kind)
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    shown = [f"{sign} {field[name]:g}" for name, sign in limits.items() if name in field]
    return _cell(" ".join([words, ", ".join(shown)]).strip())


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != "" else ""


# -------------------------------------------------------------------------------------------------
# Commands


def commands_page() -> str:
    """Every command with its usage, arguments and options."""
    lines = [
        "# Commands",
        "",
        "Generated from the command line itself. Results go to stdout, messages and progress to stderr; every command",
        "has `--json` for one JSON object and exits with a code that says [what to do](../operations.md).",
        "",
    ]
    for words, command in commands():
        if hasattr(command, "commands"):
            continue
        lines += [f"## kme-dist {' '.join(words)}", "", _escaped(_joined(command.help or "")), ""]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
        usage = ["kme-dist", *words, *(_argument(p) for p in arguments), "[OPTIONS]"]
        lines += ["```text", " ".join(usage), "```", "", "| | | default |", "|---|---|---|"]
        for p in arguments:
            lines.append(f"| `{_argument(p)}` | {_cell(p.help or '')} | {'required' if p.required else ''} |")
        for p in options:
            lines.append(f"| {_option(p)} | {_cell(p.help or '')} | {_default(p)} |")
        lines.append("")
    return "\n".join(lines)


def commands() -> Iterator[tuple[list[str], Any]]:
    """(words after kme-dist, parser) of every command, groups included."""

    def below(group: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
        for name, command in group.commands.items():
            yield [*words, name], command
            if hasattr(command, "commands"):
                yield from below(command, [*words, name])

    return below(typer.main.get_command(cli.app), [])


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper().strip("[]")
    name = name + ("..." if parameter.nargs == -1 and not name.endswith("...") else "")
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if getattr(parameter, "is_flag", False):
        return names
    return f"{names} `{parameter.metavar or _kind(parameter)}`"


def _kind(parameter: Any) -> str:
    """What follows an option; releases of typer before their own parser keep it in `type`."""
    described = getattr(parameter, "type_descriptor", None)
    name = described.annotation.__name__ if described is not None else parameter.type.name
    return {"int": "NUMBER", "integer": "NUMBER", "float": "NUMBER", "str": "TEXT"}.get(name, name.upper())


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or callable(value) or getattr(parameter, "is_flag", False) or value in ((), [], ""):
        return ""
    return f"`{value}`" if not type(value).__name__.lower().startswith(("unset", "sentinel")) else ""


# -------------------------------------------------------------------------------------------------
# Python


def python_page() -> str:
    """Every public name of `kme_dist`, by subject."""
    lines = [
        "# Python",
        "",
        "`import kme_dist as kme`: every name that is promised to stay, generated from signatures and docstrings. What",
        "is not here is internal and may change. Estimators also have the methods of scikit-learn (`get_params`, ...).",
        "",
    ]
    for subject, names in SUBJECTS.items():
        lines += [f"## {subject}", ""]
        for name in names:
            lines += [*_documented(f"kme.{name}", getattr(kme, name), level=3), ""]
    return "\n".join(lines)


def kernels_page() -> str:
    """Every kernel, and how to write one."""
    module = kme.kernels
    guide = inspect.getdoc(importlib.import_module("kme_dist.core.kernels")) or ""
    lines = ["# Kernels", "", *_docstring(guide), ""]
    for name in module.__all__:
        # The methods are the same for all kernels: shown once.
        lines += [*_documented(f"kme.kernels.{name}", getattr(module, name), level=2, methods=name == "Kernel"), ""]
    return "\n".join(lines)


def _documented(name: str, thing: Any, level: int, methods: bool = True) -> Iterator[str]:
    mark = "#" * level
    yield f"{mark} {name}"
    yield ""
    if inspect.ismodule(thing):
        yield from _docstring(inspect.getdoc(thing) or "")
        if name == "kme.bayes":
            for rule in ("sum_rule", "chain_rule", "bayes_rule"):
                yield from _documented(f"kme.bayes.{rule}", getattr(thing, rule), level + 1)
        return
    yield from _signature(name, thing)
    yield from _docstring(_own_doc(thing))
    if inspect.isclass(thing) and methods:
        for method, found in _methods(thing):
            summary = inspect.getdoc(found.fget if isinstance(found, property) else found) or ""
            yield ""
            yield f"{mark}# {name.rsplit('.', 1)[1]}.{method}"
            yield ""
            if not isinstance(found, property):
                yield from _signature(method, found)
            yield from _docstring(summary)


def _own_doc(thing: Any) -> str:
    """The docstring of a class itself: a dataclass without one has its signature there."""
    text = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    return "" if not text or text.startswith(f"{thing.__name__}(") else inspect.cleandoc(text)


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring, of the class or of a parent of ours, in order of definition."""
    seen: set[str] = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("kme_dist"):
            continue
        for name, found in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            plain = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
            documented = plain.fget if isinstance(plain, property) else plain
            if (inspect.isfunction(plain) or isinstance(plain, property)) and documented.__doc__:
                yield name, plain


def _signature(name: str, thing: Any) -> Iterator[str]:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    shown = re.sub(r"\bkme_dist(\.\w+)*\.(\w+)", r"\2", shown).replace("'", '"')
    shown = re.sub(r': "([^"]+)"', r": \1", shown)
    text = f"{name}{shown}"
    if len(text) > 100:
        inner = [f"    {p}," for p in map(str, parameters)]
        if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters):
            first = next(i for i, p in enumerate(parameters) if p.kind is inspect.Parameter.KEYWORD_ONLY)
            if not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
                inner.insert(first, "    *,")
        text = re.sub(r": '([^']+)'", r": \1", "\n".join([f"{name}(", *inner, ")"]))
    yield "```python"
    yield text
    yield "```"
    yield ""


# -------------------------------------------------------------------------------------------------
# Docstrings


def _docstring(text: str) -> list[str]:
    """A docstring as Markdown: NumPy's sections as definition lists, indented parts and doctests as code."""
    lines: list[str] = []
    for title, body in _split(text):
        if title:
            lines += [f"**{title}**", ""]
        if title in ("Parameters", "Attributes", "Returns"):
            lines += _definitions(body)
        else:
            lines += _prose(body)
        lines.append("")
    return lines


def _split(text: str) -> Iterator[tuple[str, list[str]]]:
    title, body = "", []
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if set(line) == {"-"} and len(line) > 3 and at and len(lines[at - 1]) == len(line):
            body.pop()
            yield title, body
            title, body = lines[at - 1], []
        else:
            body.append(line)
    yield title, body


def _definitions(lines: list[str]) -> Iterator[str]:
    entries: list[list[str]] = []
    for line in lines:
        for part in re.split(r" {3}(?=\w+_? : )", line) if not line.startswith(" ") else [line]:
            if part and not part.startswith(" "):
                entries.append([part])
            elif part.strip() and entries:
                first = len(entries[-1]) == 1 and part.strip()[:1].isupper() and entries[-1][0][-1] not in ".;,:"
                entries[-1] += [":", part.strip()] if first else [part.strip()]  # a type, then its meaning
    for entry in entries:
        term, colon, rest = " ".join(entry).replace(" : : ", " : ").partition(" : ")
        if colon and re.fullmatch(r"[\w, *]+", term):
            names = ", ".join(f"`{name}`" for name in term.split(", "))
            yield names
            yield f":   {_escaped(rest.replace(' : ', ': '))}"
        else:
            yield _escaped(" ".join(entry))
        yield ""


def _prose(lines: list[str]) -> Iterator[str]:
    """Paragraphs; indented and doctest lines become code."""
    block: list[str] = []

    def flush() -> Iterator[str]:
        while block and not block[-1].strip():
            block.pop()
        if block:
            yield ""
            yield (
                "```python" if any(re.search(r"^\s*(>>> |class |def |\w+ = |@)", line) for line in block) else "```text"
            )
            yield from textwrap.dedent("\n".join(block)).splitlines()
            yield "```"
            yield ""
            block.clear()

    doctest = False
    for line in lines:
        doctest = line.startswith(">>> ") or (doctest and bool(line.strip()))
        if doctest or line.startswith("    ") or (block and not line.strip()):
            block.append(line)
        else:
            yield from flush()
            yield _escaped(line) if not line.startswith("- ") else "- " + _escaped(line[2:])
    yield from flush()


def _escaped(text: str) -> str:
    """Text whose characters mean themselves in Markdown; what is in backticks stays code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_\[\]<>#|\\])", r"\\\1", p) for p in parts)


def _cell(text: str) -> str:
    """Text for the cell of a table."""
    parts = re.split(r"(`[^`]+`)", _joined(text))
    return "".join(p.replace("|", "\\|") if p.startswith("`") else _escaped(p) for p in parts)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    text = _escaped(_joined(text))
    return text if not text or text.endswith((".", ":")) else text + "."


PAGES: dict[str, Callable[[], str]] = {
    "config": config_page,
    "commands": commands_page,
    "python": python_page,
    "kernels": kernels_page,
}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]]())
