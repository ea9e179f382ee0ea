"""Functions of the class, for conditional expectations E[g(Y) | x]: as values, a mapping, or a small file.

    class_values([0, 1, 5], classes)                       # one value for each class, in the order of `classes`
    class_values({"cat": 1, "dog": 3}, classes)            # by name
    class_values("cost.yaml", classes)                     # a YAML or JSON file, with either of

        values: {cat: 1, dog: 3, other: 0}                 # `default: 0` for classes that are not listed
        expression: (y - 3) ** 2 if y > 3 else 0           # y is the class, if classes are numbers

A class is named as it is written: 007 is not the class 7. An expression is arithmetic on numbers and nothing else:
+ - * / // % **, comparisons, `if else`, `and or not`, and abs, min, max, exp, log, sqrt. It is interpreted node by
node, never run as code.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.config import parse_yaml
from kme_dist.errors import ConfigError

MAX_FILE_BYTES = 1_000_000
MAX_EXPRESSION = 1_000
_BINARY: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}
_UNARY: dict[type[ast.AST], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: lambda value: float(not value),
}
_COMPARE: dict[type[ast.AST], Callable[[float, float], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
}


def class_values(given: Any, classes: Sequence[Any]) -> np.ndarray:
    """One number for each class, from any of the forms at the top of this module (or a function of the class)."""
    labels = [label.item() if isinstance(label, np.generic) else label for label in classes]
    if isinstance(given, str | Path):
        given = _from_file(Path(given), labels)
    elif callable(given):
        given = [given(label) for label in labels]
    if isinstance(given, Mapping):
        given = _from_mapping(given, labels, "the mapping")
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(
            f"an expectation must have one number for each of {len(labels)} classes, got {given!r}"
        ) from None
    if values.shape != (len(labels),) or not np.isfinite(values).all():
        raise ConfigError(
            f"an expectation must have one finite number for each of {len(labels)} classes, got {_briefly(values)}"
        )
    return values


def _briefly(values: np.ndarray) -> str:
    return f"shape {values.shape}" if values.ndim != 1 or len(values) > 20 else str(values.tolist())


def _from_file(path: Path, labels: list[Any]) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes, the limit for class values")
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a file of class values: {error}") from None
    if not isinstance(tree, dict) or not set(tree) <= {"values", "default", "expression"} or len(tree) == 0:
        raise ConfigError(f"{path}: expected `values:` with a number per class, or `expression:` in y; got {tree!r}")
    if "expression" in tree:
        if len(tree) > 1:
            raise ConfigError(f"{path}: `expression` and `values` are mutually exclusive")
        return [evaluate(str(tree["expression"]), label, str(path)) for label in labels]
    values = tree.get("values")
    if isinstance(values, Mapping):
        return _from_mapping(values, labels, str(path), tree.get("default"))
    return values


def _from_mapping(values: Mapping[Any, Any], labels: list[Any], where: str, default: Any = None) -> list[Any]:
    names = names_of(labels)
    unknown = sorted({str(key) for key in values} - set(names))
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is not a class; the classes are {', '.join(map(str, labels[:20]))}")
    given = {names[str(key)]: value for key, value in values.items()}
    missing = [label for label in labels if label not in given]
    if missing and default is None:
        raise ConfigError(f"{where}: no value for class {missing[0]!r}; add it, or a `default`")
    return [given.get(label, default) for label in labels]


def names_of(labels: Sequence[Any]) -> dict[str, Any]:
    """The label of each name of a class: as it is written, and true and false also as YAML and JSON write them."""
    names = {str(label): label for label in labels}
    for label in labels:
        if isinstance(label, bool):
            names |= {str(label).lower(): label, str(label).upper(): label}
    return names


def evaluate(text: str, label: Any, where: str = "expression") -> float:
    """The value of an expression in `y`, the class."""
    if len(text) > MAX_EXPRESSION:
        raise ConfigError(f"{where}: the expression has {len(text)} characters, the limit is {MAX_EXPRESSION}")
    if isinstance(label, str):
        try:
            label = float(label)
        except ValueError:
            raise ConfigError(f"{where}: the class {label!r} is not a number; use `values:` instead") from None
    try:
        return float(_value(ast.parse(text.strip(), mode="eval").body, float(label)))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: {text!r} cannot be evaluated at y = {label:g} ({error})") from None


def _value(node: ast.expr, y: float) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id="y"):
            return y
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, y), _value(right, y))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, y))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARE for op in ops):
            values = [_value(part, y) for part in (left, *others)]
            return float(all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, values, values[1:], strict=False)))
        case ast.BoolOp(op=op, values=parts):
            truths = [bool(_value(part, y)) for part in parts]
            return float(all(truths) if isinstance(op, ast.And) else any(truths))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, y) else orelse, y)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            return float(_CALLS[name](*(_value(part, y) for part in args)))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed")
