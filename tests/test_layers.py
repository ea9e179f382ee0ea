"""The shape of the house: imports go down, heavy libraries have one door each, and stored bytes never run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kme_dist"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PIPELINES = sorted((ROOT / "pipelines").glob("*.py"))
OURS = [*SOURCES, *PIPELINES, *sorted((ROOT / "benchmarks").glob("*.py"))]

# What each room may import from the others: every module of the package and of pipelines/ is in one of them.
BELOW = {
    "errors": set(),
    "meter": set(),
    "backend": {"meter", "errors"},
    "config": {"errors"},
    "core": {"backend", "meter", "errors"},
    "kernels": {"core"},
    "data": {"meter", "errors"},
    "run": {"data", "core", "backend", "meter", "errors"},
    "models": {"run", "data", "core", "backend", "meter", "config", "errors"},
    "ops": {"run", "data", "backend", "meter", "config", "errors", "pipelines"},
    "dashboard": {"ops"},
    "report": {"errors"},
    "cli": {"ops", "data", "config", "errors", "pipelines"},
    "__main__": {"cli"},
    "__init__": {"models", "data", "core", "kernels", "errors"},
    "pipelines": {"models", "run", "data", "core", "kernels", "ops", "report", "config", "backend", "errors"},
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(name, ast.Constant):
                yield name.value


def part_of(path):
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE).with_suffix("").parts[0]
    return path.relative_to(ROOT).parts[0]


def relative(path):
    return str(path.relative_to(ROOT))


def run_as_a_script(path):
    """What a file imports under `if __name__ == "__main__"`: there it is the top of the house, whatever its room."""
    guarded = (node for node in parse(path).body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
    return {
        f"{node.module}.{alias.name}"
        for guard in guarded
        for node in ast.walk(guard)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


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


def test_there_is_no_cuda_source_that_goes_uncompiled():
    """All device work goes through CuPy's own functions. Whoever adds a kernel adds a test that compiles it."""
    marks = ("RawKernel", "RawModule", "ElementwiseKernel", "ReductionKernel", "__global__")
    assert not [p for p in SOURCES if any(mark in p.read_text(encoding="utf-8") for mark in marks)]
