"""`kme-dist plan` for rows and workers that need not exist."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kme_dist.cli.app import execute
from kme_dist.config import parse_config
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError
from kme_dist.pipelines import plan
from kme_dist.pipelines.scaling import Scenario


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"exp_s": 2e-9, "read_bytes_per_s": 3e8}))
    return str(path)


def config(source="none.zarr", **sections):
    cluster = {"kind": "local", "workers": 2, "memory": "4GiB"}
    return parse_config({"data": {"source": str(source)}, "cluster": cluster, **sections})


def planned(given, **scenario):
    return plan.run(given, Scenario(**scenario))["stages"]


def test_rows_and_workers_that_do_not_exist(machine):
    few, many = (
        planned(config(), rows=10**9, workers=workers, features=54, classes=7, machine=machine)
        for workers in (10, 1000)
    )
    assert [stage["stage"] for stage in few] == ["learn", "fit", "predict"]
    for small, large in zip(few[1:], many[1:], strict=True):
        assert large["seconds"] < 0.02 * small["seconds"]
        assert large["bytes_read"] == small["bytes_read"] >= 10**9 * 54 * 4
    assert "falkon" in few[1]["note"]
    twice = planned(config(), rows=2 * 10**9, workers=10, features=54, classes=7, machine=machine)
    assert twice[2]["seconds"] == pytest.approx(2 * few[2]["seconds"], rel=0.01)


def test_a_prediction_with_few_centres_costs_what_surrounds_its_kernel_values(tmp_path):
    def seconds(centres, row_value_s):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps({"row_value_s": row_value_s}))
        given = config(fit={"solver": "nystrom", "centres": centres})
        return planned(given, rows=10**8, workers=1, features=54, classes=7, machine=str(path))[2]["seconds"]

    apart = seconds(1, 2e-8) - seconds(1, 1e-8)
    assert apart == pytest.approx(10**8 * (54 + 7) * 1e-8, rel=0.01)
    assert seconds(1, 2e-8) < 0.5 * seconds(1_000, 2e-8)


@pytest.mark.parametrize(
    ("kind", "options", "learn"),
    [
        ("cen", {"hidden": [16]}, {"steps": 20, "batch_size": 500}),
        ("cen", {"hidden": [16]}, {"steps": 20}),
        ("askl", {"features": 100, "epochs": 2}, {"batch_size": 200}),
    ],
)
def test_every_kind_of_model_is_counted(kind, options, learn, machine):
    given = config(model={"kind": kind, "options": options}, learn=learn)
    found = planned(given, rows=10**6, workers=10, features=20, classes=3, machine=machine)
    assert all(stage["seconds"] > 0 for stage in found if stage["stage"] != "fit")
    if kind == "askl":
        assert found[0]["bytes_read"] == 2 * 10**6 * 20 * 4, "two epochs"
        assert found[1]["seconds"] == 0, "the learned layer is the fit"
    else:
        steps = 20 * 500 if learn.get("batch_size") else 3 * 20 * 10**6
        assert found[0]["bytes_read"] == steps * 20 * 4
        assert "features" in found[1]["note"]


def test_features_learned_on_all_rows_are_counted(machine):
    scenario = {"workers": 2, "features": 20, "classes": 3, "machine": machine}
    small, large = (planned(config(model={"features": "spectral"}), rows=rows, **scenario) for rows in (10**5, 10**6))
    assert "networks" in small[0]["note"]
    for one, ten in zip(small, large, strict=True):
        assert 2.5 < ten["seconds"] / one["seconds"] < 11, "epochs fall with the root of the rows"
    auto, few = (planned(config(), rows=rows, **scenario) for rows in (10**5, 30_000))
    assert "networks" in auto[0]["note"], "auto compares them with centres"
    assert "networks" not in few[0]["note"]
    assert auto[0]["seconds"] > small[0]["seconds"]


def test_explicit_features_of_exact_gradients_are_counted(machine):
    given = config(model={"features": {"name": "random_fourier", "features": 64}}, learn={"mode": "full", "steps": 5})
    learn, fit, _ = planned(given, rows=10**6, workers=10, features=20, classes=3, machine=machine)
    assert learn["bytes_read"] == 3 * 5 * 10**6 * 20 * 4
    assert learn["reduction_depth"] > 0
    assert "features" in fit["note"]


def test_bytes_agree_with_the_plan_of_a_data_set(tmp_path, machine):
    rng = np.random.default_rng(0)
    X, y = rng.random((900, 5), dtype=np.float32), rng.integers(0, 3, 900)
    ingest((X, y), tmp_path / "rows.zarr", shuffle=0)
    given = config(
        tmp_path / "rows.zarr",
        model={"objective": "rcb", "dtype": "float32"},
        learn={"steps": 12, "batch_size": 100, "batches_per_step": 2},
    )
    facts = plan.run(given, Scenario(machine=machine))
    learn, fit, predict = facts["stages"]
    assert (facts["rows"], facts["bytes_read"]) == (900, 12 * 2 * 100 * 5 * 4)
    assert learn["bytes_read"] == facts["bytes_read"]
    assert learn["worker_bytes"] == facts["worker_bytes"]
    assert fit["note"].startswith("cholesky")
    assert predict["tasks"] == 1


def test_a_plan_says_what_it_is_of(tmp_path, machine):
    rng = np.random.default_rng(0)
    ingest((rng.random((900, 5)), rng.integers(0, 3, 900)), tmp_path / "rows.zarr", dtype="float32")
    mistyped = plan.run(config(tmp_path / "row.zarr"), Scenario(rows=10**6, machine=machine))
    assert (mistyped["features"], mistyped["classes"]) == (50, 10)
    assert mistyped["data"].endswith("row.zarr is not a data set")
    real = plan.run(config(tmp_path / "rows.zarr"), Scenario(rows=10**6, machine=machine))
    assert (real["features"], real["classes"], "data" in real) == (5, 3, False)
    wider = plan.run(config(tmp_path / "rows.zarr"), Scenario(features=500, machine=machine))
    assert (wider["rows"], wider["features"], wider["classes"]) == (900, 500, 3)
    assert wider["stages"][2]["bytes_read"] == 900 * 500 * 4


def test_the_same_constants_give_the_same_json(tmp_path, machine, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("data: {source: none.zarr}\ncluster: {memory: 4GiB}\n")
    arguments = ["plan", str(path), "--rows", "1e8", "--workers", "50", "--machine", machine, "--json"]
    printed = []
    for _ in range(2):
        assert execute(arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    found = json.loads(printed[0])
    assert (found["rows"], found["workers"]) == (10**8, 50)
    assert execute(arguments[:-1]) == 0
    assert "bottleneck" in capsys.readouterr().out


def test_what_cannot_be_planned_is_refused(machine, tmp_path, capsys):
    with pytest.raises(ConfigError, match="is not a data set"):
        plan.run(config())
    given = config(learn={"batch_size": 50_000})
    with pytest.raises(ConfigError, match=r"learn needs .* GB on a worker, which has 4.29 GB"):
        planned(given, rows=10**6, workers=10, machine=machine)
    with pytest.raises(ConfigError, match="rows=0"):
        Scenario(rows=0)
    path = tmp_path / "config.yaml"
    path.write_text("data: {source: none.zarr}\n")
    assert execute(["plan", str(path), "--rows", "many"]) == 2
    assert "must be an integer >= 1" in capsys.readouterr().err
    assert execute(["plan"]) == 2
