"""`kme-dist learn` and `kme-dist plan`: what they leave, what they say beforehand, what they refuse."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from distributed import Client, LocalCluster

from kme_dist import CMERegressor, MCEClassifier, kernels, load
from kme_dist.cli.app import execute
from kme_dist.config import load_config
from kme_dist.core import features
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import Scaling
from kme_dist.data.store import load_arrays
from kme_dist.errors import ConfigError
from kme_dist.ops.cluster import versions
from kme_dist.pipelines import doctor, fit, learn, plan
from kme_dist.pipelines import run as runs
from kme_dist.pipelines.folder import Listener
from kme_dist.pipelines.progress import RunProgress, rate_in_words
from kme_dist.run.train import _AUTO_STEPS

CONFIG = """
data: {{source: {source}}}
model: {{kernel: {{name: gaussian, ard: true}}, objective: rcb, regularization: 0.1}}
learn: {{steps: 5, batch_size: 80, batches_per_step: 2, seed: 1}}
cluster: {{kind: serial}}
output: {{folder: {folder}}}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(1)
    X = rng.random((1000, 3), dtype=np.float32)
    place = tmp_path_factory.mktemp("pipeline") / "d.zarr"
    return ingest((X, (2 * X[:, 0]).astype(int)), place, shuffle=0, split="train=0.8,test=0.2")


@pytest.fixture
def config(data, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG.format(source=data.path, folder=tmp_path / "run"))
    return path


def test_a_run_leaves_what_was_learned_and_how(config, data, tmp_path):
    summary = learn.run(load_config(config), name="small")
    folder = tmp_path / "run"
    arrays, attributes = load_arrays(folder / "learned.zarr")
    kernel = kernels.from_config(attributes["kernel"])
    assert kernel.to_config() == summary["kernel"]
    assert attributes["regularization"] == summary["regularization"]
    np.testing.assert_array_equal(arrays["scaling/shift"], data.split_statistics("train").minimum)
    assert attributes["steps"] == 5
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert json.loads((folder / "run.json").read_text())["status"] == "succeeded"
    assert load_config(folder / "config.yaml").learn.batches_per_step == 2


def test_the_same_command_again_finds_nothing_to_do_and_a_longer_run_goes_on(config):
    first = learn.run(load_config(config), name="small")
    again = learn.run(load_config(config), name="small")
    assert (again["steps"], again["steps_now"], again["kernel"]) == (5, 0, first["kernel"])
    longer = learn.run(load_config(config, ["learn.steps=8"]), name="small")
    assert (longer["steps"], longer["steps_now"]) == (8, 3)


def test_fewer_steps_than_were_learned_are_refused_until_asked_to_start_over(config, tmp_path, monkeypatch):
    """The parameters after fewer steps are not known any more."""
    monkeypatch.setattr("kme_dist.pipelines.pages.run_page", lambda *arguments, **settings: "<html></html>")
    runs.run(load_config(config, ["learn.steps=8"]), name="small")
    shorter = load_config(config, ["learn.steps=3"])
    for command in (learn.run, runs.run):
        with pytest.raises(ConfigError, match=r"has learned 8 steps, and 3 are requested: .* learn\.steps .* --fresh"):
            command(shorter, name="small")
    assert (tmp_path / "run" / "model.zarr").exists(), "nothing was replaced"
    assert not (tmp_path / "run" / "previous").exists()
    assert runs.run(load_config(config, ["learn.steps=8"]), name="small")["reused"]
    assert learn.run(shorter, name="small", fresh=True)["steps"] == 3
    longer = learn.run(load_config(config, ["learn.steps=8"]), name="small")
    assert (longer["steps"], longer["steps_now"]) == (8, 5)


def test_other_settings_are_refused_until_asked_to_start_over(config):
    learn.run(load_config(config), name="small")
    other = load_config(config, ["learn.batch_size=90"])
    with pytest.raises(ConfigError, match=r"learn\.batch_size was 80, now it is 90.*--fresh"):
        learn.run(other, name="small")
    assert learn.run(other, name="small", fresh=True)["steps_now"] == 5


def test_half_a_line_of_metrics_is_dropped(config, tmp_path):
    learn.run(load_config(config), name="small")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 6, "obj')
    learn.run(load_config(config, ["learn.steps=7"]), name="small")
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 8))


def test_the_plan_counts_batches_bytes_and_seconds(config):
    facts = plan.run(load_config(config))
    assert (facts["rows"], facts["batches_per_epoch"], facts["tasks"], facts["epochs"]) == (800, 10, 10, 1.0)
    assert facts["estimated_seconds"] > 0, "however fast the machine"
    small, large = (
        plan.run(load_config(config, [f"learn.batch_size={n}"]), calibrate=False)["worker_bytes"] for n in (100, 800)
    )
    assert large - small >= (800**2 - 100**2) * 4, "at least a Gram matrix in single precision"


def test_the_plan_says_how_short_rounds_wait_less(config, monkeypatch):
    monkeypatch.setattr(plan, "_median_seconds", lambda *arguments: 0.008)
    local = ["cluster.kind=local", "cluster.workers=2"]  # a round of two batches: 8 ms and about 4 ms of messages
    advice = plan.run(load_config(config, local))["advice"]
    assert "computes for 8 ms and waits for about 4 ms" in advice
    assert "learn.delay: 1" in advice
    assert "learn.local_steps: 5 or more" in advice, "4 / (4 + 5 x 8) < 0.1 < 4 / (4 + 4 x 8)"
    followed = (["learn.delay=1"], ["learn.mode=local", "learn.local_steps=5"], ["cluster.kind=serial"])
    assert not any("advice" in plan.run(load_config(config, [*local, *changes])) for changes in followed)


def test_the_plan_knows_the_steps_and_the_memory_of_auto(config):
    changes = ["model.objective=auto", "learn.steps=1000", "learn.batches_per_step=1", "learn.batch_size=100"]
    facts = plan.run(load_config(config, changes))
    assert (facts["objectives"], facts["steps"], facts["tasks"]) == (["calibrated"], _AUTO_STEPS, _AUTO_STEPS)
    assert facts["estimated_seconds"] > 0
    bound = plan.run(load_config(config, [*changes, "model.objective=rcb"]), calibrate=False)
    assert facts["worker_bytes"] > bound["worker_bytes"], "the derivative needs further matrices"


def test_learning_under_auto_that_is_interrupted_compares_the_same_candidates(config, tmp_path):
    def stop(record):
        if record["step"] == 3:
            raise KeyboardInterrupt

    changes = ["model.objective=auto", "model.kernel=auto"]
    with pytest.raises(KeyboardInterrupt):
        learn.run(load_config(config, changes), name="small", listener=Listener(step=stop))
    resumed = learn.run(load_config(config, changes), name="small")
    assert 0 < resumed["steps_now"] < 5
    learn.run(load_config(config, [*changes, f"output.folder={tmp_path / 'whole'}"]), name="small")
    found, whole = (load_arrays(tmp_path / name / "learned.zarr")[1]["starts"] for name in ("run", "whole"))
    assert found == whole
    assert resumed["objective"] > 0


def test_what_cannot_fit_is_refused_with_a_batch_that_would(config):
    needed = plan.run(load_config(config, ["learn.batch_size=800"]), calibrate=False)["worker_bytes"]
    tight = ["cluster.kind=local", "cluster.workers=1", f"cluster.memory={needed - 1_000_000}B"]
    with pytest.raises(ConfigError, match=r"learn\.batch_size 800 needs") as caught:
        plan.run(load_config(config, ["learn.batch_size=800", *tight]))
    fits = int(re.search(r"batches of at most (\d+) rows", str(caught.value)).group(1))
    plan.run(load_config(config, [f"learn.batch_size={fits}", *tight]), calibrate=False)
    with pytest.raises(ConfigError):
        plan.run(load_config(config, [f"learn.batch_size={fits + 1}", *tight]), calibrate=False)


@pytest.mark.parametrize(("steps", "said"), [(300, 1), (5, 0)])
def test_steps_that_auto_does_not_make_are_said_once(config, steps, said):
    lines = []
    changes = ["model.objective=auto", f"learn.steps={steps}"]
    learn.run(load_config(config, changes), name="small", listener=runs.Listener(say=lines.append))
    found = [line for line in lines if "learn.steps" in line]
    assert found == ["learn: 100 steps, the most under model.objective auto, instead of the 300 of learn.steps"] * said


@pytest.mark.parametrize("rows", [1, 800])
def test_a_worker_that_no_batch_fits_is_told_the_memory_it_needs(config, rows):
    small = ["cluster.kind=local", "cluster.workers=1", "cluster.memory=200MiB", f"learn.batch_size={rows}"]
    with pytest.raises(ConfigError, match=r"has 0\.21 GB, and needs 0\.\d\d GB .* no learn\.batch_size fits") as caught:
        plan.run(load_config(config, small), calibrate=False)
    assert "at most" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("data.source=sklearn:iris", "is not a data set; create one first: kme-dist ingest"),
        ("data.source=absent.zarr", "is not a data set"),
        ("model.objective=cv", "model.objective is 'cv'"),
        ("cluster.kind=addres", "cluster.kind"),
        ("cluster.memory=lots", "cluster.memory is 'lots'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(config, capsys, change, line):
    changes = ["--set", change] + (["--set", "cluster.kind=local"] if "memory" in change else [])
    assert execute(["plan", str(config), *changes]) == 2
    printed = capsys.readouterr().err.strip()
    assert line in printed
    assert "\n" not in printed


def test_the_commands_print_json(config, capsys):
    assert execute(["learn", str(config), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5
    assert execute(["plan", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 10


# --- modes ------------------------------------------------------------------------------------------


def test_replicas_are_learned_and_resumed_by_the_command(config, tmp_path):
    local = ["learn.mode=local", "learn.steps=8", "learn.local_steps=2"]
    first = learn.run(load_config(config, local), name="small")
    assert (first["steps"], first["steps_now"]) == (8, 8)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    longer = learn.run(load_config(config, [*local, "learn.steps=12"]), name="small")
    assert (longer["steps"], longer["steps_now"]) == (12, 4)
    assert load_arrays(tmp_path / "run" / "learned.zarr")[1]["mode"] == "local"
    facts = plan.run(load_config(config, local), calibrate=False)
    assert (facts["mode"], facts["rounds"], facts["tasks"]) == ("local", 4, 16)


def test_delayed_gradients_are_learned_and_resumed_by_the_command(config, tmp_path):
    delayed = ["learn.delay=1"]
    assert learn.run(load_config(config, delayed), name="small")["steps"] == 5
    longer = learn.run(load_config(config, [*delayed, "learn.steps=8"]), name="small")
    assert (longer["steps"], longer["steps_now"]) == (8, 3)
    with pytest.raises(ConfigError, match=r"learn\.delay was 1, now it is not set"):
        learn.run(load_config(config), name="small")


def test_explicit_features_are_learned_by_full_gradients(config, data, tmp_path):
    full = ["learn.mode=full", "model.features={name: random_fourier, features: 8}", "model.dtype=float64"]
    summary = learn.run(load_config(config, [*full, "learn.steps=6"]), name="small")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["objective"] < lines[0]["objective"]
    arrays, attributes = load_arrays(tmp_path / "run" / "learned.zarr")
    stored = {name.removeprefix("features/"): a for name, a in arrays.items() if name.startswith("features/")}
    again = features.from_config(attributes["features"], n_features=data.features, arrays=stored)
    assert summary["features"] == attributes["features"]
    X = np.linspace(0, 1, 6).reshape(2, 3)
    start = features.from_config({"name": "random_fourier", "features": 8}, n_features=3, seed=1)
    assert again.forward(X).shape == start.forward(X).shape
    assert not np.allclose(again.forward(X), start.forward(X)), "they have moved"
    facts = plan.run(load_config(config, full))
    assert (facts["mode"], facts["features_cached"], facts["rows"]) == ("full", True, 800)
    assert facts["estimated_seconds"] > 0
    assert (
        plan.run(load_config(config, [*full, "learn.feature_cache=1kB"]), calibrate=False)["features_cached"] is False
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["learn.mode=full"], r"model\.features is missing"),
        (["model.features=identity"], "explicit features require learn.mode full"),
        (["learn.mode=full", "model.features=identity"], "has no parameters to learn"),
        (["learn.mode=full", "model.features=fourrier"], "feature map 'fourrier' is unknown"),
        (["learn.mode=full", "model.objective=validation"], "model.objective must be rcb or erm"),
        (["learn.mode=local", "learn.local_steps=2"], r"learn\.steps is 5, which is not a multiple"),
        (
            ["learn.mode=local", "learn.steps=10", "learn.delay=1"],
            r"learn\.delay is 1, which requires learn\.mode sync",
        ),
        (["learn.delay=2"], r"learn\.delay"),
        (["model.kind=cen", "learn.delay=1"], r"learn\.delay is only for kernels"),
        (["learn.feature_cache=lots"], r"learn\.feature_cache is 'lots'"),
        (["model.backend=cupy"], "no usable CUDA device"),
    ],
)
def test_modes_that_do_not_go_together_are_refused(config, changes, line):
    with pytest.raises(ConfigError, match=line):
        learn.run(load_config(config, changes), name="small")


# --- what a person sees -----------------------------------------------------------------------------


def test_the_progress_line_has_all_that_a_person_asks_for(config):
    shown = io.StringIO()
    with RunProgress(shown) as progress:
        learn.run(load_config(config), name="small", listener=runs.Listener(step=progress))
    line = shown.getvalue().splitlines()[-1]
    assert line.startswith("rcb: step 5/5")
    for word in ("/s", "q ", "risk ", "r ", "lambda ", "gradient ", "rows/s", "waiting ", "ETA "):
        assert f"  {word}" in line or word in ("/s", "rows/s"), word
    assert re.search(r"[\d,]+ rows/s  waiting \d+%  ETA", line)


def test_a_message_comes_after_the_last_line_of_the_steps_before_it(config):
    shown = io.StringIO()
    with RunProgress(shown) as progress:
        learn.run(load_config(config), name="small", listener=runs.Listener(step=progress))
        progress.flush()
        print("fit: cholesky", file=shown)
    lines = shown.getvalue().splitlines()
    assert lines[-1] == "fit: cholesky"
    assert lines[-2].startswith("rcb: step 5/5")


@pytest.mark.parametrize(("seconds", "text"), [(10.0, "10.0 s/step"), (0.5, "2 steps/s"), (0.001, "1e+03 steps/s")])
def test_slow_steps_are_counted_in_seconds(seconds, text):
    assert rate_in_words(1 / seconds) == text


# --- doctor -----------------------------------------------------------------------------------------


def test_doctor_says_which_worker_differs_in_what(monkeypatch, capsys):
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=":0"
        ) as cluster,
        Client(cluster),
    ):
        address = cluster.scheduler_address
        report = doctor.examine(scheduler=address)
        assert (report["cluster"]["workers"], report["cluster"]["same_versions"]) == (1, True)
        assert any("has 2 threads" in problem for problem in report["problems"])
        theirs = {"tcp://w:1": {**versions(), "numpy": "1.0", "zarr": "2.0"}, "tcp://w:2": versions()}
        monkeypatch.setattr(Client, "run", lambda *a, **k: theirs)
        assert execute(["doctor", "--scheduler", address, "--json"]) == 2
        printed = capsys.readouterr()
        assert json.loads(printed.out)["cluster"]["same_versions"] is False
        assert "worker tcp://w:1 has numpy 1.0, this process has" in printed.err
        assert "worker tcp://w:1 has zarr 2.0" in printed.err
        assert "tcp://w:2" not in printed.err


def test_doctor_reaches_nobody_in_the_clear_from_afar(capsys):
    assert execute(["doctor", "--scheduler", "tcp://10.1.2.3:8786", "--quiet"]) == 2
    assert "cluster.insecure: true" in capsys.readouterr().err


def test_curves_of_heavy_tails_are_learned_stored_and_used_by_the_fit(tmp_path):
    """`learn` and `fit`, one after the other, give the model of Python."""
    rng = np.random.default_rng(4)
    Z = rng.normal(size=(400, 3))
    X = np.exp(3 * Z)
    data = ingest((X, (Z[:, 0] * Z[:, 1] > 0).astype(int)), tmp_path / "d.zarr")
    path = tmp_path / "tails.yaml"
    path.write_text(
        f"data: {{source: {data.path}}}\nlearn: {{steps: 5}}\ncluster: {{kind: serial}}\n"
        f"output: {{folder: {tmp_path / 'run'}}}\n"
    )
    learn.run(load_config(path), name="tails")
    fit.run(load_config(path), name="tails")
    model, expected = load(tmp_path / "run" / "model.zarr"), MCEClassifier(steps=5).fit(data)
    assert model.scaling_.curves.columns.tolist() == [0, 1, 2]
    assert model.predict_proba(X).tobytes() == expected.predict_proba(X).tobytes()


@pytest.mark.parametrize("scaling", [None, "auto", "standard"])
def test_curves_of_a_regression_are_those_of_python(tmp_path, scaling):
    rng = np.random.default_rng(4)
    Z = rng.normal(size=(300, 3))
    X = np.exp(3 * Z)
    data = ingest((X, Z[:, 0] * Z[:, 1] + 0.1 * rng.normal(size=300)), tmp_path / "d.zarr", task="regression")
    path, given = tmp_path / "tails.yaml", "" if scaling is None else f", scaling: {scaling}"
    path.write_text(
        f"data: {{source: {data.path}}}\nmodel: {{kind: cme{given}}}\nlearn: {{steps: 5}}\ncluster: {{kind: serial}}\n"
        f"output: {{folder: {tmp_path / 'run'}}}\n"
    )
    learn.run(load_config(path), name="tails")
    fit.run(load_config(path), name="tails")
    model, expected = load(tmp_path / "run" / "model.zarr"), CMERegressor(steps=5, scaling=scaling or "auto").fit(data)
    assert (model.scaling_.curves is None) == (scaling == "standard")
    assert model.predict(X).tobytes() == expected.predict(X).tobytes()
    learned = Scaling.restored(load_arrays(tmp_path / "run" / "learned.zarr")[0])
    np.testing.assert_allclose(learned.apply(X, "float64").std(axis=0), 1.0)  # of what has no curve
