"""`kme-dist run` is learn, fit, predict and evaluate in order: the same files, to the last bit, whichever way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kme_dist
from kme_dist.cli.app import execute
from kme_dist.config import parse_config
from kme_dist.data.ingest import ingest
from kme_dist.data.store import load_arrays
from kme_dist.errors import ConfigError, DataError
from kme_dist.pipelines import evaluate, fit, learn, predict, run
from kme_dist.pipelines.folder import Listener
from kme_dist.run.train import _AUTO_STEPS

COMMANDS = ("learn", "fit", "predict", "evaluate")
PICTURES = "kme_dist.pipelines.pages.run_page"


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes a second; these tests are about something else."""
    monkeypatch.setattr(PICTURES, lambda *arguments, **settings: "<html></html>")


def csv(folder, rows=90):
    rng = np.random.default_rng(3)
    colours, heights = rng.choice(["blue", "green", "red"], rows), rng.random(rows).round(3)
    kinds = np.where((colours == "red") | (heights > 0.6), "tall", "small")
    lines = [f"{h},{c},{k}" for h, c, k in zip(heights, colours, kinds, strict=True)]
    path = folder / "table.csv"
    path.write_text("\n".join(["height,colour,kind", *lines]) + "\n")
    return {"source": str(path), "label": "kind"}


def stored(folder, split="train=0.7,test=0.3"):
    X = np.random.default_rng(4).random((150, 3)).astype(np.float32)
    place = folder / "stored.zarr"
    ingest((X, (3 * X[:, 0]).astype(int)), place, shuffle=0, split=split, chunk_bytes=600, shard_bytes=2400)
    return {"source": str(place)}


CASES = {
    "a table with a text column": (csv, {}, {"steps": 12}),
    "a stored data set": (stored, {}, {"steps": 12, "batches_per_step": 2}),
    "replicas": (stored, {"objective": "validation"}, {"steps": 6, "mode": "local", "local_steps": 3}),
    "a network": (csv, {"kind": "cen", "options": {"hidden": [6]}}, {"steps": 8, "batch_size": 40}),
    "frequencies": (csv, {"kind": "askl", "options": {"features": 10, "epochs": 2}}, {"batch_size": 40}),
    "explicit features": (
        stored,
        {"features": {"name": "random_fourier", "features": 8}, "dtype": "float64"},
        {"steps": 5, "mode": "full"},
    ),
    "several starts": (
        csv,
        {"objective": "rcb"},
        {"steps": 4, "starts": [{"name": "far", "length_scale": 20.0}, {"name": "near", "length_scale": 0.5}]},
    ),
}


def config_of(folder, data, model, learning, **sections):
    return {
        "data": data,
        "model": model,
        "learn": {"checkpoint_steps": 2, **learning},
        "cluster": {"kind": "serial"},
        "output": {"folder": str(folder)},
        **sections,
    }


def without_times(value):
    """All but what a clock decides."""
    if isinstance(value, dict):
        timed = ("second", "share", "digests", "seal")
        return {k: without_times(v) for k, v in value.items() if not any(word in k for word in timed)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def assert_same_model(one, other):
    (arrays, attributes), (theirs, their_attributes) = (load_arrays(place / "model.zarr") for place in (one, other))
    assert {name: a.tobytes() for name, a in arrays.items()} == {name: a.tobytes() for name, a in theirs.items()}
    assert without_times(attributes) == without_times(their_attributes)


def assert_same_predictions(one, other):
    found, theirs = (kme_dist.open_predictions(place / "predictions.zarr") for place in (one, other))
    assert found.names == theirs.names
    for name in found.names:
        assert found.read(name).tobytes() == theirs.read(name).tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
def test_a_run_is_its_commands_in_order(case, tmp_path, capsys):
    source, model, learning = CASES[case]
    data = source(tmp_path)
    whole = run.run(parse_config(config_of(tmp_path / "whole", data, model, learning)), name="x")
    path = tmp_path / "single.yaml"
    path.write_text(json.dumps(config_of(tmp_path / "single", data, model, learning)))
    printed = {}
    for command in COMMANDS:
        assert execute([command, str(path), "--quiet"]) == 0, command
        capsys.readouterr()
        assert execute([command, str(path), "--quiet", "--json"]) == 0, "again there is nothing to do"
        printed[command] = json.loads(capsys.readouterr().out)
    assert printed["learn"]["steps_now"] == 0
    assert_same_model(tmp_path / "whole", tmp_path / "single")
    assert_same_predictions(tmp_path / "whole", tmp_path / "single")
    assert printed["evaluate"]["accuracy"] == whole["accuracy"]
    assert printed["evaluate"]["log_loss"] == whole["log_loss"]


def stages_done(folder, config):
    before = json.loads((folder / "run.json").read_text())["stages"]
    run.run(config, name="x")
    after = json.loads((folder / "run.json").read_text())["stages"]
    return [name for name in after if after[name] != before.get(name)]


def test_a_run_resumes_where_single_commands_have_ended(tmp_path):
    config = parse_config(config_of(tmp_path / "run", csv(tmp_path), {"objective": "rcb"}, {"steps": 4}))
    learn.run(config, name="x")
    fit.run(config, name="x")
    assert stages_done(tmp_path / "run", config) == ["predict", "evaluate", "report"]
    assert learn.run(config, name="x")["steps_now"] == 0
    seen = []
    fit.run(config, name="x", listener=Listener(say=seen.append))
    assert seen == [], "no cluster is started when there is nothing to do"
    assert run.run(config, name="x")["reused"]


def test_learn_keeps_every_candidate_and_fit_the_best(tmp_path):
    """By default the objective is that of the estimator: several kernels are compared, the best one comes first."""
    config = parse_config(config_of(tmp_path / "run", stored(tmp_path), {}, {"steps": 10}))
    learn.run(config, name="x")
    _, found = load_arrays(tmp_path / "run" / "learned.zarr")
    (start,) = found["starts"]
    names = [candidate["name"] for candidate in start["candidates"]]
    assert sorted(names) == ["common matern-3/2", "learned gaussian", "learned matern-1/2", "learned matern-3/2"]
    assert [candidate["phase"] for candidate in start["candidates"]] == ["calibrated", None, None, None]
    result = fit.run(config, name="x")
    losses = result["fits"][0]["losses"]
    assert losses == {candidate["name"]: candidate["loss"] for candidate in start["candidates"]}
    model = kme_dist.load(tmp_path / "run" / "model.zarr")
    alone = kme_dist.MCEClassifier(steps=10).fit(kme_dist.open_dataset(config.data.source))
    assert model.objective_ == names[0] == alone.objective_
    assert model.loo_log_loss_ == alone.loo_log_loss_
    assert len(model.history_) == len(alone.history_) == 10
    np.testing.assert_array_equal(model.embedding_.weights, alone.embedding_.weights)


def test_learn_stops_early_where_the_recipe_says_so(tmp_path):
    """A plateau ends the learning under "validation", a limit of steps under "auto", in the command as in a run."""
    for objective, most in (("validation", 399), ("auto", _AUTO_STEPS)):
        learning = {"steps": 400, "checkpoint_steps": 100}
        config = config_of(tmp_path / objective, csv(tmp_path), {"objective": objective}, learning)
        assert 1 < learn.run(parse_config(config), name="x")["steps"] <= most


def test_under_auto_the_rate_falls_to_the_last_step_so_other_steps_are_another_learning(tmp_path):
    def learned(steps, fresh=False):
        config = config_of(tmp_path / "run", csv(tmp_path), {}, {"steps": steps})
        return learn.run(parse_config(config), name="x", fresh=fresh)

    learned(3)
    with pytest.raises(ConfigError, match=r"learn\.steps was 3, now it is 5"):
        learned(5)
    again = learned(5, fresh=True)
    alone = learn.run(parse_config(config_of(tmp_path / "alone", csv(tmp_path), {}, {"steps": 5})), name="x")
    assert (again["kernel"], again["regularization"]) == (alone["kernel"], alone["regularization"])


def test_auto_learns_whole_rounds_of_replicas(tmp_path):
    for local, steps in ((40, _AUTO_STEPS // 40 * 40), (200, max(200, _AUTO_STEPS // 200 * 200))):
        learning = {"steps": 400, "mode": "local", "local_steps": local}
        config = config_of(tmp_path / str(local), csv(tmp_path), {}, learning)
        assert learn.run(parse_config(config), name="x")["steps"] == steps


@pytest.mark.parametrize("kernel", [None, "auto"])
def test_kernel_auto_is_a_kernel_like_any_other_in_a_config(tmp_path, kernel):
    own = {} if kernel is None else {"kernel": kernel}
    starts = [{"name": "wide", "length_scale": 2.0}, {"name": "default"}]
    config = config_of(tmp_path / "run", csv(tmp_path), own, {"steps": 2, "starts": starts})
    learn.run(parse_config(config), name="x")
    found = load_arrays(tmp_path / "run" / "learned.zarr")[1]["starts"]
    assert {c["name"] for c in found[0]["candidates"]} == {"learned", "common"}, "a kernel was given"
    assert len(found[1]["candidates"]) == 4, "profiles are compared"


def test_a_data_set_without_parts_is_learned_from_as_a_whole(tmp_path):
    """And `kme-dist run`, which needs test rows, divides it; from then on the single commands use that."""
    config = parse_config(config_of(tmp_path / "run", stored(tmp_path, None), {"objective": "rcb"}, {"steps": 3}))
    learn.run(config, name="x")
    assert fit.run(config, name="x")["rows"] == 150
    assert run.run(config, name="x")["train_rows"] == 120
    assert fit.run(config, name="x")["rows"] == 120
    assert learn.run(config, name="x")["steps_now"] == 0


def test_columns_that_the_config_chooses_are_those_that_are_learned_from(tmp_path):
    data = {**stored(tmp_path), "features": ["x0", "x2"]}
    config = parse_config(config_of(tmp_path / "run", data, {"objective": "rcb"}, {"steps": 3}))
    learn.run(config, name="x")
    assert load_arrays(tmp_path / "run" / "learned.zarr")[1]["feature_names"] == ["x0", "x2"]


def test_a_killed_learn_resumes_and_a_run_finishes_it(tmp_path):
    def stop(record):
        if record["step"] == 7:
            raise KeyboardInterrupt

    def config(name):
        return parse_config(config_of(tmp_path / name, data, {}, {"steps": 10}))

    data, seen = csv(tmp_path), []
    with pytest.raises(KeyboardInterrupt):
        learn.run(config("cut"), name="x", listener=Listener(step=stop))
    run.run(config("cut"), name="x", listener=Listener(step=lambda record: seen.append(record["step"])))
    assert seen[0] > 1
    run.run(config("whole"), name="x")
    assert_same_model(tmp_path / "cut", tmp_path / "whole")


def test_results_of_other_settings_are_replaced_by_a_run_and_kept_by_learn(tmp_path):
    def config(rate, **output):
        tree = config_of(tmp_path / "run", data, {"objective": "rcb"}, {"steps": 3, "learning_rate": rate})
        tree["output"] |= output
        return parse_config(tree)

    data = csv(tmp_path)
    learn.run(config(0.1), name="x")
    with pytest.raises(ConfigError, match=r"learn\.learning_rate was 0\.1, now it is 0\.2.*--fresh"):
        learn.run(config(0.2), name="x")
    with pytest.raises(ConfigError, match=r"output\.overwrite is false"):
        run.run(config(0.2, overwrite=False), name="x")
    run.run(config(0.2), name="x")
    assert learn.run(config(0.2), name="x")["steps_now"] == 0
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1, "those of other settings are gone"


@pytest.mark.parametrize("again", [run.run, fit.run], ids=["run", "fit"])
def test_a_model_of_other_settings_is_kept_when_it_is_replaced_and_the_command_says_so(tmp_path, again):
    def config(**settings):
        return parse_config(
            config_of(tmp_path / "run", data, {"objective": "rcb"}, {"steps": 3})
            | {"fit": {"solver": "cholesky"} | settings}
        )

    data, lines, folder = csv(tmp_path), [], tmp_path / "run"
    run.run(config(), name="x")
    first = json.loads((folder / "run.json").read_text())["id"]
    kept = load_arrays(folder / "model.zarr")[0]
    again(config(), name="x", listener=Listener(say=lines.append))
    assert not (folder / "previous").exists(), "nothing is replaced"
    again(config(solver="nystrom", centres=9), name="x", listener=Listener(say=lines.append))
    said = [line for line in lines if "is replaced" in line]
    assert len(said) == 1
    assert first in said[0]
    assert "fit.solver (was cholesky, is nystrom), fit.centres (was None, is 9)" in said[0]
    assert said[0].endswith(f"kept in {folder / 'previous'}")
    again = load_arrays(folder / "previous" / "model.zarr")[0]
    assert all(np.array_equal(again[name], value) for name, value in kept.items())
    assert "cholesky" in (folder / "previous" / "config.yaml").read_text()
    assert "nystrom" in (folder / "config.yaml").read_text()


def test_a_run_keeps_its_id_until_it_has_succeeded(tmp_path):
    def config(rate=0.1):
        tree = config_of(tmp_path / "run", data, {"objective": "rcb"}, {"steps": 9, "learning_rate": rate})
        return parse_config(tree)

    def stop(record):
        raise KeyboardInterrupt

    def facts():
        return json.loads((tmp_path / "run" / "run.json").read_text())

    data = csv(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learn.run(config(), name="x", listener=Listener(step=stop))
    interrupted = facts()["id"]
    assert interrupted.startswith("x-")
    learn.run(config(), name="x")
    assert facts()["id"] == interrupted, "it was resumed"
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {(line["run"], line["pipeline"]) for line in lines} == {(interrupted, "x")}
    run.run(config(0.2), name="x")
    assert facts()["id"] != interrupted, "another run"
    fit.run(config(0.2), name="x", fresh=True, listener=Listener(run_id="job-7"))
    assert facts()["id"] == "job-7", "that of the job, if a job runs it"


def test_new_parquet_rows_are_encoded_as_those_of_the_run(tmp_path):
    """Without a word on how: the run folder has the encoding."""
    import pandas as pd

    tree = config_of(tmp_path / "run", csv(tmp_path), {"objective": "rcb"}, {"steps": 3})
    run.run(parse_config(tree), name="x")
    new = pd.DataFrame({"colour": ["red", "blue"], "height": [0.2, 0.3]})
    new.to_parquet(tmp_path / "new.parquet")
    tree["predict"] = {"data": str(tmp_path / "new.parquet"), "out": str(tmp_path / "new.zarr")}
    result = predict.run(parse_config(tree), name="x")
    assert (result["rows"], result["status"]) == (2, "succeeded")


def test_an_evaluation_has_the_figures_of_the_run(tmp_path):
    config = parse_config(config_of(tmp_path / "run", csv(tmp_path), {"objective": "rcb"}, {"steps": 3}))
    summary = run.run(config, name="x")
    assert evaluate.run(config, name="x")["accuracy"] == summary["accuracy"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_modules_are_programs(name):
    script = Path(__file__).parents[2] / "pipelines" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script), "absent.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "config file absent.yaml does not exist" in done.stderr


# --- what a run folder holds is not mixed up ------------------------------------------------------------------


def other_table(folder):
    """The same columns and classes, other rows."""
    (folder / "other").mkdir()
    data = csv(folder / "other")
    path = Path(data["source"])
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *reversed(rows)]).replace("0.", "1.") + "\n")
    return data


def digests(folder):
    return {path.name: load_digest(path) for path in sorted(folder.glob("*.zarr"))}, (folder / "run.json").read_text()


def load_digest(path):
    return json.loads((path / "zarr.json").read_text())["attributes"].get("attributes_digest")


@pytest.mark.parametrize("command", ["learn", "fit", "predict", "evaluate"])
def test_a_command_with_other_rows_is_refused_and_changes_nothing(tmp_path, command):
    place = tmp_path / "run"
    run.run(parse_config(config_of(place, csv(tmp_path), {"objective": "rcb"}, {"steps": 3})), name="mine")
    before = digests(place)
    other = parse_config(config_of(place, other_table(tmp_path), {"objective": "rcb"}, {"steps": 3}))
    module = {"learn": learn, "fit": fit, "predict": predict, "evaluate": evaluate}[command]
    with pytest.raises(ConfigError, match="other rows"):
        module.run(other, name="mine")
    assert digests(place) == before


def test_a_fit_without_learning_says_so(tmp_path):
    said = []
    config = parse_config(config_of(tmp_path / "run", csv(tmp_path), {"objective": "rcb"}, {"steps": 3}))
    fit.run(config, name="mine", listener=Listener(say=said.append))
    assert any("run `kme-dist learn` first" in line for line in said)


def test_the_figures_of_learn_are_those_of_the_candidate_it_names(tmp_path):
    config = parse_config(config_of(tmp_path / "run", csv(tmp_path), {}, {"steps": 5}))
    found = learn.run(config, name="mine")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["phase"] for line in lines} == {"calibrated"}
    first = load_arrays(tmp_path / "run" / "learned.zarr")[1]["starts"][0]["candidates"][0]
    assert found["regularization"] == first["regularization"]
    own = [line for line in lines if line["phase"] == first["phase"]]
    assert found["objective"] == own[-1]["objective"]


def test_a_copied_run_folder_uses_its_own_rows(tmp_path):
    place, copy = tmp_path / "run", tmp_path / "copy"
    run.run(parse_config(config_of(place, csv(tmp_path), {"objective": "rcb"}, {"steps": 3})), name="mine")
    shutil.copytree(place, copy)
    shutil.rmtree(place)
    data = {"source": str(tmp_path / "table.csv"), "label": "kind"}
    again = parse_config(config_of(copy, data, {"objective": "rcb"}, {"steps": 3}))
    assert fit.run(again, name="mine", fresh=True)["rows"] == 72


def test_predictions_are_not_compared_with_rows_that_have_changed_since(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    data, same = kme_dist.open_dataset(stored(tmp_path)["source"]), stored(tmp_path / "elsewhere")["source"]
    model = kme_dist.MCEClassifier(steps=0, regularization=1e-3).fit(data)
    kme_dist.predict(model, data, tmp_path / "p.zarr", split="test")
    assert evaluate.evaluate(tmp_path / "p.zarr", same, split="test")["rows"] == 45, "the same rows, stored elsewhere"
    X, y = data.read()
    options = {"split": "train=0.7,test=0.3", "chunk_bytes": 600, "shard_bytes": 2400, "overwrite": True}
    ingest((X[::-1].copy(), y[::-1].copy()), data.path, **options)
    with pytest.raises(DataError, match="has changed since"):
        evaluate.evaluate(tmp_path / "p.zarr", data.path, split="test")


def test_rows_of_predictions_are_those_of_the_table_before_it_was_split(tmp_path):
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 200))
    y = np.where(x + z > 0, "a", "b")
    (tmp_path / "t.csv").write_text(
        "x,z,y\n" + "".join(f"{a},{b},{c}\n" for a, b, c in zip(x.tolist(), z.tolist(), y, strict=True))
    )
    config = parse_config(
        {
            "data": {"source": str(tmp_path / "t.csv"), "label": "y"},
            "learn": {"steps": 3},
            "cluster": {"kind": "serial"},
            "output": {"folder": str(tmp_path / "run")},
        }
    )
    run.run(config, name="rows")
    found = kme_dist.open_predictions(tmp_path / "run" / "predictions.zarr")
    rows = found.read("row")
    model = kme_dist.load(tmp_path / "run")
    assert len(np.unique(rows)) == len(rows) == 40
    assert rows.max() < 200
    np.testing.assert_allclose(
        found.read("probability"), model.predict_proba(np.stack([x, z], axis=1)[rows]), atol=1e-4
    )


# --- data that the config names --------------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path):
    """A config of a run that predicts further rows; the rows are in arrivals.zarr, and grow."""
    data, X = stored(tmp_path), np.random.default_rng(5).random((40, 3)).astype(np.float32)
    ingest(X, tmp_path / "arrivals.zarr")
    tree = config_of(tmp_path / "run", data, {}, {"steps": 4}, predict={"data": str(tmp_path / "arrivals.zarr")})
    (tmp_path / "named.yaml").write_text(json.dumps(tree))
    return tree, X


def with_keys(tree, section, **keys):
    return parse_config({**tree, section: {**tree[section], **keys}})


def check_predictions(path, run_folder, X):
    found = kme_dist.open_predictions(path)
    found.verify()
    assert found.status == "complete"
    np.testing.assert_array_equal(found.labels(), kme_dist.load(run_folder).predict(X))


@pytest.mark.parametrize("out", [None, "scores.zarr"])
def test_a_run_predicts_the_data_of_its_config_in_every_call(named, tmp_path, out):
    (tree, X), folder = named, tmp_path / "run"
    config = parse_config(tree) if out is None else with_keys(tree, "predict", out=str(tmp_path / out))
    place = folder / "data-predictions.zarr" if out is None else tmp_path / out
    first = run.run(config, name="x")
    facts = first["data_predictions"]
    assert (first["reused"], facts["predictions"], facts["computed_rows"]) == (False, str(place), 40)
    assert (first["quarantined"], first["skipped_rows"]) == ([], 0)
    check_predictions(place, folder, X)
    assert kme_dist.open_predictions(folder / "predictions.zarr").rows == 45, "those of the test rows are there too"
    again = run.run(config, name="x")
    assert (again["reused"], again["data_predictions"]["computed_rows"]) == (True, 0)
    more = np.concatenate([X, X[:7] + 1])
    kme_dist.open_dataset(tmp_path / "arrivals.zarr").append(more[40:])
    grown = run.run(config, name="x")
    assert (grown["reused"], grown["data_predictions"]["computed_rows"]) == (False, 7)
    check_predictions(place, folder, more)
    shutil.rmtree(place)
    assert run.run(config, name="x")["data_predictions"]["computed_rows"] == 47
    check_predictions(place, folder, more)
    assert first["accuracy"] == again["accuracy"] == grown["accuracy"]


def test_the_command_predict_finds_what_the_run_has_predicted(named, tmp_path, capsys):
    config = str(tmp_path / "named.yaml")
    assert execute(["run", config, "--quiet"]) == 0
    assert f"40 rows of {tmp_path / 'arrivals.zarr'} (40 computed)" in capsys.readouterr().out
    assert execute(["predict", config, "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["computed_rows"], facts["predictions"]) == (0, str(tmp_path / "run" / "data-predictions.zarr"))


def test_a_destination_with_predictions_of_another_model_is_treated_as_the_config_says(named, tmp_path):
    (tree, X), folder, out = named, tmp_path / "run", tmp_path / "scores.zarr"
    asked = {"out": str(out)}
    run.run(with_keys(tree, "predict", **asked), name="x")
    before = kme_dist.open_predictions(out).labels()
    tree = {**tree, "learn": {**tree["learn"], "steps": 1}}
    with pytest.raises(ConfigError, match=r"finished predictions with other settings \(model changed\)"):
        run.run(with_keys(tree, "predict", **asked), name="x")
    np.testing.assert_array_equal(kme_dist.open_predictions(out).labels(), before)
    assert json.loads((folder / "run.json").read_text())["stages"]["report"], "the run itself is done"
    beside = run.run(with_keys(tree, "predict", **asked, on_model_change="new-folder"), name="x")
    path = beside["data_predictions"]["predictions"]
    assert path.startswith(str(tmp_path / "scores-"))
    check_predictions(path, folder, X)
    np.testing.assert_array_equal(kme_dist.open_predictions(out).labels(), before)
    replaced = run.run(with_keys(tree, "predict", **asked, on_model_change="recompute"), name="x")
    assert replaced["data_predictions"]["computed_rows"] == 40
    check_predictions(out, folder, X)


def test_predictions_in_the_run_folder_follow_its_model(named, tmp_path):
    tree, X = named
    run.run(parse_config(tree), name="x")
    run.run(with_keys(tree, "learn", steps=1), name="x")
    check_predictions(tmp_path / "run" / "data-predictions.zarr", tmp_path / "run", X)


def test_a_run_whose_data_have_rows_without_a_prediction_ends_like_predict(named, tmp_path, capsys):
    _, X = named
    X[[3, 30]] = np.inf
    pq.write_table(pa.table({f"x{i}": X[:, i] for i in range(3)}), tmp_path / "holes.parquet")
    command = [str(tmp_path / "named.yaml"), "--set", f"predict.data={tmp_path / 'holes.parquet'}", "--quiet"]
    assert execute(["run", *command]) == 65
    assert "skipped row 3: feature 0: the value is inf, must be finite" in capsys.readouterr().err
    assert execute(["run", *command, "--json"]) == 65
    facts = json.loads(capsys.readouterr().out)
    assert (facts["skipped_rows"], facts["quarantined"], facts["status"]) == (2, [], "succeeded")
    job = ["schedule", *command, "--pipeline", "run", "--once", "--at", "2026-03-01T02:30Z", "--root", str(tmp_path)]
    assert execute(job) == 65
    said = capsys.readouterr().err
    assert "skipped 2 rows that are not finite, the others are done" in said
    assert f"kme-dist inspect {tmp_path / 'run' / 'data-predictions.zarr'}" in said
