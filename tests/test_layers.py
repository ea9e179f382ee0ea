"""The shape of the house: imports go down, heavy libraries have one door each, and stored bytes never run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kme_dist"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PIPELINES = sorted((ROOT / "pipelines").rglob("*.py"))
OURS = [*SOURCES, *PIPELINES, *sorted((ROOT / "benchmarks").rglob("*.py"))]

# What each room may import from the others: every module of the package and of pipelines/ is in one of them.
BELOW = {
    "errors": set(),
    "meter": set(),
    "failpoints": {"errors"},
    "lapack": set(),
    "backend": {"lapack", "meter", "errors"},
    "config": {"errors"},
    "core": {"backend", "lapack", "meter", "errors"},
    "kernels": {"core"},
    "data": {"meter", "failpoints", "errors"},
    "run": {"data", "core", "backend", "meter", "failpoints", "errors"},
    "models": {"run", "data", "core", "backend", "meter", "failpoints", "config", "errors"},
    "ops": {"run", "data", "backend", "meter", "failpoints", "config", "errors"},
    "dashboard": {"ops"},
    "report": {"core", "errors"},
    "cli": {"ops", "data", "config", "errors", "pipelines"},
    "__main__": {"cli"},
    "__init__": {"models", "data", "core", "kernels", "report", "errors"},
    "pipelines": {"models", "run", "data", "core", "kernels", "ops", "report", "config", "backend", "errors"},
}
# Imports inside functions that close a cycle and must stay, each with its reason.
CYCLES = {
    ("core.kernels.base", "core.kernels.composite"): "k1 + k2 and k1 * k2 are operators of the base class",
    ("data.readers", "data.csv_reader"): "open_source chooses a reader, and every reader builds on its blocks",
    ("data.readers", "data.matrix_readers"): "open_source chooses a reader, and every reader builds on its blocks",
    ("data.readers", "data.cluster"): "open_source chooses a reader, and every reader builds on its blocks",
    ("data.dataset", "data.append"): "Dataset.append is a method of the data set that it extends",
    ("run.lanes", "run.executors"): "what a lane runs on a worker is wrapped as the executor wraps its tasks",
}
# Libraries with one importer: a module or a folder.
DOORS = {
    "cupy": ("backend.py",),
    "cupyx": ("backend.py",),
    "torch": ("run/torch_features.py",),
    "zarr": ("data/",),
    "obstore": ("data/",),
    "dask": ("run/", "data/cluster.py", "data/lazy.py", "ops/cluster.py", "ops/submit.py"),
    "distributed": ("run/", "data/cluster.py", "ops/"),
    "bokeh": ("ops/dashboard_page.py",),
    "tornado": ("ops/dashboard.py",),
    "prometheus_client": ("ops/metrics.py",),
    "cryptography": ("ops/certs.py",),
    "apscheduler": ("ops/schedule.py",),
}


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path):
    """Every module imported anywhere in a file, also inside functions and by a written name through importlib."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            called = ast.unparse(node.func)
            if called.endswith("import_module") and isinstance(name, ast.Constant) and name.value != "kme_dist.":
                yield name.value
            elif called == "load" and part_of(path) == "cli":  # kme_dist.cli.options
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: which module?"
                yield f"kme_dist.{name.value}"


def part_of(path):
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE).with_suffix("").parts[0]
    return path.relative_to(ROOT).parts[0]


def relative(path):
    return str(path.relative_to(ROOT))


def imported_under(path, condition):
    """What a file imports in the top-level `if` blocks whose test mentions `condition`."""
    guarded = (node for node in parse(path).body if isinstance(node, ast.If) and condition in ast.unparse(node.test))
    return {
        f"{node.module}.{alias.name}"
        for guard in guarded
        for node in ast.walk(guard)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def run_as_a_script(path):
    """There a file is the top of the house, whatever its room."""
    return imported_under(path, "__main__")


@pytest.mark.parametrize("path", [*SOURCES, *PIPELINES], ids=relative)
def test_imports_go_down(path):
    part = part_of(path)
    for name in set(imports(path)) - run_as_a_script(path):
        if name.split(".")[0] != "kme_dist":
            continue
        target = name.split(".")[1]
        target = target if target in BELOW else "__init__"  # a public name, such as kme_dist.MCEClassifier
        if target == "__init__":
            assert part == "pipelines", f"{part} must import {name} from its home"
        else:
            assert target == part or target in BELOW[part], f"{part} must not import {name}"


def module_name(path):
    parts = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph():
    """Which module of ours imports which, also inside functions, but not for types alone; without `kme_dist.`"""
    modules = {module_name(path): path for path in [*SOURCES, *PIPELINES]}
    graph = {}
    for module, path in modules.items():
        skipped = run_as_a_script(path) | imported_under(path, "TYPE_CHECKING")
        found = {name.removeprefix("kme_dist.") for name in set(imports(path)) - skipped}
        found = {name if name in modules else name.rpartition(".")[0] for name in found}
        graph[module] = {name for name in found if name in modules and name not in ("", module)}
    return graph


def find_cycle(graph):
    """The modules of one cycle in order; None when there is none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return None
        path.append(module)
        for below in sorted(graph[module]):
            if cycle := visit(below):
                return cycle
        path.pop()
        done.add(module)
        return None

    return next((cycle for module in sorted(graph) if (cycle := visit(module))), None)


def test_there_is_no_import_cycle_not_even_inside_functions():
    graph = import_graph()
    for (module, below), reason in CYCLES.items():
        assert below in graph[module], f"{module} no longer imports {below} ({reason}): take it off the list"
        graph[module].discard(below)
    assert find_cycle(graph) is None
    for module, below in CYCLES:
        assert find_cycle({**graph, module: {*graph[module], below}}), f"{module} -> {below} closes no cycle"


def test_a_cycle_would_be_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}
    assert find_cycle(graph) == ["b", "d"]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_heavy_libraries_have_one_door(path):
    place = path.relative_to(PACKAGE).as_posix()
    for name in imports(path):
        doors = DOORS.get(name.split(".")[0])
        if doors:
            assert place.startswith(doors), f"{place} imports {name}; only {doors} may"


@pytest.mark.parametrize("path", OURS, ids=relative)
def test_stored_bytes_never_run(path):
    dangerous = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    assert not dangerous & {name.split(".")[0] for name in imports(path)}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert called not in ("yaml.unsafe_load", "yaml.full_load", "eval", "exec"), f"{path}:{node.lineno}"
            if called == "yaml.load":
                assert keywords.get("Loader") in safe_loaders(path), f"{path}:{node.lineno}"
            if called in ("np.load", "numpy.load"):
                assert keywords.get("allow_pickle") == "False", f"{path}:{node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert ast.unparse(node.value) == "False"


def safe_loaders(path):
    """Classes of a file that extend YAML's safe loader."""
    classes = (node for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))
    return {"yaml.SafeLoader"} | {c.name for c in classes if [ast.unparse(b) for b in c.bases] == ["yaml.SafeLoader"]}


@pytest.mark.parametrize("path", OURS, ids=relative)
def test_nothing_is_left_undone_or_swallowed(path):
    text = path.read_text(encoding="utf-8")
    assert not [mark for mark in ("TODO", "FIXME", "XXX") if mark in text]
    for node in ast.walk(parse(path)):
        assert not (isinstance(node, ast.Name) and node.id == "NotImplementedError"), f"{path}:{node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body)
            assert not (broad and silent), f"{path}:{node.lineno} swallows every error"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_modules_stay_readable(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600


@pytest.mark.parametrize("path", [p for p in SOURCES if part_of(p) == "core"], ids=relative)
def test_core_touches_no_files_clocks_or_clusters(path):
    forbidden = {"os", "io", "pathlib", "time", "datetime", "socket", "threading", "subprocess", "random", "logging"}
    assert not forbidden & {name.split(".")[0] for name in imports(path)}
    calls = {ast.unparse(n.func) for n in ast.walk(parse(path)) if isinstance(n, ast.Call)}
    assert not {c for c in calls if c in ("open", "print") or (c.startswith("np.random.") and "default_rng" not in c)}
    generators = [n for n in ast.walk(parse(path)) if isinstance(n, ast.Call)]
    generators = [n for n in generators if ast.unparse(n.func) == "np.random.default_rng"]
    assert all(n.args for n in generators), "a generator without a seed is global state"


def test_cuda_source_is_in_files_that_a_test_compiles():
    """Whoever adds a kernel adds it to a `.cu` file, and a test that compiles it and compares its results."""
    marks = ("RawKernel", "ElementwiseKernel", "ReductionKernel", "__global__")
    assert not [p for p in SOURCES if any(mark in p.read_text(encoding="utf-8") for mark in marks)]
    assert [p for p in SOURCES if "RawModule" in p.read_text(encoding="utf-8")] == [PACKAGE / "backend.py"]
    assert [p.name for p in PACKAGE.rglob("*.cu")] == ["tiles.cu"], "see tests/core/test_fused_tiles.py"
