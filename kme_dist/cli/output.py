"""What commands print: results on stdout, messages on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def stderr_printer(quiet: bool) -> Callable[[str], None]:
    """A function for messages to a person, which does nothing with --quiet."""

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def print_tree(facts: Mapping[str, Any], *, width: int = 160, indent: int = 0) -> None:
    """Nested facts as indented `name  value` lines, each value cut at `width` characters."""
    column = max((len(str(key)) for key in facts), default=0)
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            print(f"{' ' * indent}{key}")
            print_tree(value, width=width, indent=indent + 2)
        else:
            text = _to_text(str(key), value)
            print(f"{' ' * indent}{key!s:{column}}  {text if len(text) <= width else text[: width - 3] + '...'}")


def _to_text(key: str, value: Any) -> str:
    if key.endswith("bytes") and isinstance(value, int):
        return _bytes(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "; ".join(_to_text(key, item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_to_text(name, inner)}" for name, inner in value.items()) or "none"
    return str(value)


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
