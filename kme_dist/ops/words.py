"""Words of messages that depend on a number."""

from __future__ import annotations


def plural(count: float, noun: str) -> str:
    """The noun for that many: `plural(1, "class")` is "class", `plural(2, "class")` is "classes"."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
