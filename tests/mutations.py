"""Small mistakes that a program could contain: one changed expression or statement each, found by their syntax.

    for mutation in mutations("core/pivots.py", source): ...
    mutated = mutation.applied(source)

What is changed: comparisons, arithmetic, and / or, numbers by one, True and False, conditions (negated), `not`
(removed), calls for their effect, `raise`, `continue`, `break` and `x += ...` (dropped), returned values (None), min
and max (exchanged).

What is left alone, by rule, because no promise depends on it:

- words: texts and f-strings, what an error or a log line says, `describe`, `__repr__`, `__str__`, docstrings;
- types: annotations, `TYPE_CHECKING`, overloads, abstract methods;
- speed only: settings named in `SPEED`, such as tiles, caches, blocks and timeouts; decorators; the meter;
- tolerance of the call for a case that cannot occur: `strict=`, `exist_ok=`, `missing_ok=`;
- positions of warnings in the stack.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

SPEED = re.compile(r"bytes|tile|cache|memory|seconds|timeout|threads|block|buffer|pause|delay|interval_s|ahead", re.I)
IDLE_KEYWORDS = {"strict", "exist_ok", "missing_ok", "stacklevel", "indent", "name", "copy", "check_finite", "sync"}
IDLE_KEYWORDS |= {"overwrite_a", "overwrite_b", "optimize", "parents", "repr", "compare", "daemon", "separators"}
IDLE_CALLS = {"warn", "warning", "info", "debug", "error", "log", "metered", "count", "setdefault", "field", "plural"}
IDLE_CALLS |= {"counted", "cast", "TypeVar", "getLogger", "flush", "close", "freeze"}
IDLE_FUNCTIONS = {"__repr__", "__str__", "describe", "__all__", "__post_repr__", "_repr_html_"}

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
}
EXCHANGED = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "argmin": "argmax"}
EXCHANGED |= {"argmax": "argmin", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}


@dataclass(frozen=True)
class Mutation:
    """One change of a module: bytes [start, stop) of its source are replaced."""

    module: str  # core/pivots.py
    function: str  # the qualified name; <module> outside of functions
    kind: str
    before: str
    after: str
    start: int
    stop: int
    line: int
    block: str  # the block of statements it lies in, as `marked` counts them
    number: int = 0  # among equal changes of the same function

    @property
    def id(self) -> str:
        """Stays the same while other code changes."""
        text = f"{self.module}:{self.function}: {self.kind}: {_flat(self.before)} -> {_flat(self.after)}"
        return text + (f" #{self.number}" if self.number else "")

    def applied(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.stop :]).decode()


def _flat(text: str) -> str:
    return " ".join(text.split())


def mutations(module: str, source: str) -> list[Mutation]:
    """All changes of a module that are not excluded by rule, in the order of the source."""
    finder = _Finder(module, source)
    finder.visit(ast.parse(source))
    numbered: dict[str, int] = {}
    found = []
    for mutation in finder.found:
        seen = numbered.get(mutation.id, 0)
        numbered[mutation.id] = seen + 1
        found.append(Mutation(**{**mutation.__dict__, "number": seen}))
    return found


def sampled(by_module: dict[str, list[Mutation]], seed: int) -> Iterator[Mutation]:
    """All mutations in an order drawn by `seed`: module by module in turns, and within a module kind by kind. The
    order of those that remain does not change if others come or go."""
    queues = {module: _by_kind(found, seed) for module, found in by_module.items()}
    while queues:
        for module in sorted(queues, key=lambda name: _hash(seed, name)):
            if not queues[module]:
                del queues[module]
                continue
            yield queues[module].pop(0)


def _by_kind(found: list[Mutation], seed: int) -> list[Mutation]:
    kinds: dict[str, list[Mutation]] = {}
    for mutation in sorted(found, key=lambda mutation: _hash(seed, mutation.id)):
        kinds.setdefault(mutation.kind, []).append(mutation)
    ordered = sorted(kinds, key=lambda kind: _hash(seed, found[0].module + kind)) if found else []
    return [kinds[kind][i] for i in range(len(found)) for kind in ordered if i < len(kinds[kind])]


def _hash(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed}|{text}".encode()).hexdigest()


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str, source: str) -> None:
        self.module, self.raw = module, source.encode()
        self.lines = [0]
        for line in self.raw.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.names: list[str] = []
        self.blocks = [f"{module}:<module>:0"]
        self.counted: dict[str, int] = {}
        self.found: list[Mutation] = []

    # --- where we are

    @property
    def function(self) -> str:
        return ".".join(self.names) or "<module>"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        decorated = {_name_of(found) for found in node.decorator_list}
        if node.name in IDLE_FUNCTIONS or decorated & {"overload", "abstractmethod"}:
            return
        self.names.append(node.name)
        for default in [*node.args.defaults, *(found for found in node.args.kw_defaults if found is not None)]:
            self._default(node, default)
        self.inside(node.body)
        self.names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _default(self, node: ast.FunctionDef, default: ast.expr) -> None:
        named = (
            [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) or None :] if node.args.defaults else []
        )
        pairs = [
            *zip(named, node.args.defaults, strict=False),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        name = next(argument.arg for argument, value in pairs if value is default)
        if not SPEED.search(name) and name not in IDLE_KEYWORDS:
            self.visit(default)

    def inside(self, body: list[ast.stmt]) -> None:
        """The statements of one block, which is counted as `marked` counts it."""
        if not body:
            return
        self.blocks.append(next_block(self.module, self.function, self.counted))
        for statement in body:
            self.visit(statement)
        self.blocks.pop()

    def add(self, node: ast.AST, kind: str, after: str) -> None:
        start = self.lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        stop = self.lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        before = self.raw[start:stop].decode()
        self.found.append(
            Mutation(
                self.module,
                self.function,
                kind,
                before,
                after,
                start,
                stop,
                node.lineno,
                self.blocks[-1],  # type: ignore[attr-defined]
            )
        )

    # --- statements

    def visit_If(self, node: ast.If | ast.While) -> None:
        if _name_of(node.test) == "TYPE_CHECKING":
            return
        self.condition(node.test)
        self.inside(node.body)
        self.inside(node.orelse)

    visit_While = visit_If  # type: ignore[assignment]

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.inside(node.body)
        self.inside(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
        self.inside(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        self.inside(node.body)
        for handler in node.handlers:
            self.inside(handler.body)
        self.inside(node.orelse)
        self.inside(node.finalbody)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            if case.guard is not None:
                self.condition(case.guard)
            self.inside(case.body)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _name_of(node.value.func) not in IDLE_CALLS:
            self.add(node, "drop call", "pass")
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "drop update", "pass")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "drop raise", "pass")  # what it says is left alone

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "drop jump", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "drop jump", "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node, "return None", "return None")
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        named = " ".join(_name_of(target) for target in node.targets)
        if self.function == "<module>" and (SPEED.search(named) or named == "__all__"):
            return
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not SPEED.search(_name_of(node.target)):
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass  # for the type checker

    # --- expressions

    def condition(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)) and not isinstance(test, ast.Compare):
            self.add(test, "negate condition", f"not ({ast.unparse(test)})")
        self.visit(test)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_Compare(self, node: ast.Compare) -> None:
        if type(node.ops[0]) in COMPARED:
            self.add(node, "comparison", _changed(node, ops=[COMPARED[type(node.ops[0])](), *node.ops[1:]]))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in COMPUTED and not any(_is_text(side) for side in (node.left, node.right)):
            self.add(node, "arithmetic", _changed(node, op=COMPUTED[type(node.op)]()))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, "and / or", _changed(node, op=other))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, "remove not", f"({ast.unparse(node.operand)})")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.add(node, "sign", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, "truth", str(not value))
        elif isinstance(value, int):
            self.add(node, "number", str(value + 1))
        elif isinstance(value, float):
            self.add(node, "number", repr(value + 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if name in IDLE_CALLS or name.endswith(("Error", "Warning")):
            return
        if name in EXCHANGED:
            self.add(node.func, "exchange", _renamed(node.func, EXCHANGED[name]))
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in IDLE_KEYWORDS and not SPEED.search(keyword.arg or ""):
                self.visit(keyword.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _name_of(node.value) not in ("Callable", "dict", "list", "tuple", "Iterator", "Sequence", "Mapping"):
            self.generic_visit(node)


def _changed(node: ast.expr, **changes: object) -> str:
    other = copy.copy(node)
    for name, value in changes.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def _renamed(function: ast.expr, name: str) -> str:
    other = copy.copy(function)
    setattr(other, "id" if isinstance(function, ast.Name) else "attr", name)
    return ast.unparse(other)


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


# --- which blocks of statements a test reaches -----------------------------------------------------


def next_block(module: str, function: str, counted: dict[str, int]) -> str:
    counted[function] = counted.get(function, 0) + 1
    return f"{module}:{function}:{counted[function]}"


def marked(module: str, source: str) -> str:
    """The module with a call `_reached(BLOCK)` at the beginning of every block, for the record of what tests reach."""
    tree = ast.parse(source)
    _Marker(module).walk(tree.body)
    first = 0
    while first < len(tree.body) and (
        (isinstance(tree.body[first], ast.Expr) and isinstance(tree.body[first].value, ast.Constant))  # type: ignore[attr-defined]
        or (isinstance(tree.body[first], ast.ImportFrom) and tree.body[first].module == "__future__")  # type: ignore[attr-defined]
    ):
        first += 1
    tree.body.insert(first, ast.parse("from kme_marks import reached as _reached").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


class _Marker:
    """Visits blocks in the order in which `_Finder` does."""

    def __init__(self, module: str) -> None:
        self.module, self.names, self.counted = module, [], {}  # type: ignore[var-annotated]

    def walk(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self.names.append(node.name)
                self.walk(node.body)
                self.names.pop()
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorated = {_name_of(found) for found in node.decorator_list}
                if node.name in IDLE_FUNCTIONS or decorated & {"overload", "abstractmethod"}:
                    continue
                self.names.append(node.name)
                self.block(node.body)
                self.names.pop()
            elif isinstance(node, ast.If) and _name_of(node.test) == "TYPE_CHECKING":
                continue
            elif isinstance(node, ast.Match):
                for case in node.cases:
                    self.block(case.body)
            else:
                for inner in _inner_blocks(node):
                    self.block(inner)

    def block(self, body: list[ast.stmt]) -> None:
        if not body:
            return
        name = next_block(self.module, ".".join(self.names) or "<module>", self.counted)
        self.walk(body)
        at = 1 if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else 0
        body.insert(at, ast.parse(f"_reached({name!r})").body[0])


def _inner_blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(node, ast.If | ast.While | ast.For | ast.AsyncFor):
        return [node.body, node.orelse]
    if isinstance(node, ast.With | ast.AsyncWith):
        return [node.body]
    if isinstance(node, ast.Try):
        return [node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody]
    return []
