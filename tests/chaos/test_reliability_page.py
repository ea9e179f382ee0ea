"""docs/reliability.md: every fault has tests that exist and carry its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
TABLE = dict(re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE))


def marked():
    """Rows by the name of the test, also of parametrised ones whose cases carry the marker."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "mark.chaos" not in text:
            continue
        tree = ast.parse(text)
        cases = {ast.unparse(node.targets[0]): node for node in tree.body if isinstance(node, ast.Assign)}
        for test in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            own = " ".join(ast.unparse(decorator) for decorator in test.decorator_list)
            own += " ".join(ast.unparse(node) for name, node in cases.items() if re.search(rf"\b{name}\b", own))
            if "mark.chaos" in own:
                rows = {
                    row for inside in re.findall(r"mark\.chaos\(([^)]*)\)", own) for row in re.findall(r"\d+", inside)
                }
                if "ROWS[stage]" in own:
                    rows |= set(re.findall(r"\d+", ast.unparse(cases["ROWS"])))
                found.setdefault(test.name, set()).update(rows)
    return found


def test_the_page_has_every_row():
    assert list(map(int, TABLE)) == list(range(1, 28))


def test_every_row_has_a_test_that_carries_it():
    rows = set().union(*marked().values())
    assert set(TABLE) <= rows


def test_every_named_test_exists_and_carries_the_row_where_it_is_named():
    found = marked()
    for row, tests in TABLE.items():
        for name in re.findall(r"`(test_\w+)`", tests):
            assert row in found.get(name, set()), (row, name)
