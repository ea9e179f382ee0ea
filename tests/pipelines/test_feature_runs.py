"""Runs whose model learns its own features: every stage, the pictures in the report, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kme_dist
from kme_dist.config import load_config, parse_config
from kme_dist.errors import ConfigError
from kme_dist.pipelines import fit, learn, recipes
from kme_dist.pipelines.folder import Listener
from kme_dist.pipelines.run import run

CONFIGS = Path(__file__).parents[2] / "configs"


def tree(folder, kind, options=None, **changes):
    sections = {
        "data": {"source": "sklearn:iris"},
        "model": {"kind": kind, "options": options or {}},
        "learn": {"batch_size": 40},
        "cluster": {"kind": "serial"},
        "output": {"folder": str(folder)},
    }
    for section, keys in changes.items():
        sections[section] = {**sections.get(section, {}), **keys}
    return sections


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing takes a second; these tests are about something else."""
    monkeypatch.setattr("kme_dist.pipelines.pages.run_page", lambda *arguments, **settings: "<html></html>")


def test_the_shipped_config_goes_from_the_table_to_the_report(tmp_path):
    overrides = [f"output.folder={tmp_path / 'run'}", "cluster.kind=serial", "learn.steps=60"]
    summary = run(load_config(CONFIGS / "digits_network.yaml", overrides), name="digits_network")
    assert summary["accuracy"] > 0.93
    assert summary["steps"] == 60
    model = kme_dist.load(summary["model"])
    assert [part.weight.shape[1] for part in model.features_.parts] == [64, 32]
    page = Path(summary["report"]).read_text(encoding="utf-8")
    for title in ("Learning curves", "Accuracy by epoch", "with a softmax layer", "Confusion matrix", "Mistakes"):
        assert title in page
    assert len(model.softmax_curve_) == len(model.curve_) == 20
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 61))
    assert summary["accuracy"] == pytest.approx(model.curve_[-1]["accuracy"], abs=0.01)


def test_frequencies_are_drawn_for_features_and_pixels(tmp_path):
    """As drawn and as learned: bars for named features, maps where rows are images."""
    options = {"features": 30, "epochs": 2}
    named = run(parse_config(tree(tmp_path / "iris", "askl", {**options, "epochs": 20})), name="iris")
    assert named["accuracy"] > 0.8
    page = Path(named["report"]).read_text(encoding="utf-8")
    assert "<h2>Frequencies" in page or "Frequencies</" in page
    assert "60 learned frequencies" in page
    assert "petal width (cm)" in page
    images = {"source": "sklearn:digits", "image_shape": [8, 8]}
    drawn = run(parse_config(tree(tmp_path / "digits", "askl", options, data=images)), name="digits")
    page = Path(drawn["report"]).read_text(encoding="utf-8")
    assert "Pixel length scales" in page
    assert "before" in page


def test_a_network_of_cosines_shows_its_frequencies(tmp_path):
    options = {"network": {"name": "spectral", "features": 25}}
    config = tree(tmp_path, "cen", options, learn={"steps": 10, "batch_size": 40})
    assert "50 learned frequencies" in Path(run(parse_config(config), name="iris")["report"]).read_text()


def test_a_second_run_has_nothing_to_do_and_a_killed_one_goes_on(tmp_path, no_pictures):
    config = parse_config(tree(tmp_path / "run", "cen", {"hidden": [8]}, learn={"steps": 20, "checkpoint_steps": 5}))

    def stop(record):
        if record["step"] == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, name="iris", listener=Listener(step=stop))
    seen = []
    run(config, name="iris", listener=Listener(step=lambda record: seen.append(record["step"])))
    assert seen == list(range(13, 21))
    whole = config.model_copy(update={"output": config.output.model_copy(update={"folder": str(tmp_path / "other")})})
    run(whole, name="iris")
    models = [kme_dist.load(tmp_path / place / "model.zarr") for place in ("run", "other")]
    assert models[0].weights_.tobytes() == models[1].weights_.tobytes()
    assert run(config, name="iris")["reused"]


def test_the_written_config_says_the_same_again(tmp_path):
    for kind, options in (("cen", {"hidden": [8], "dropout": 0.1}), ("askl", {"features": 30})):
        config = parse_config(tree(tmp_path, kind, options, learn={"seed": 3}))
        full = recipes.resolved(config)
        again = parse_config(json.loads(json.dumps(full)))
        ours, theirs = (recipes.starts_of(c, 4)[0].settings for c in (config, again))
        assert recipes.estimator_of(config, ours).get_params() == recipes.estimator_of(again, theirs).get_params()
        assert recipes.resolved(again) == full


@pytest.mark.parametrize(
    ("kind", "options", "sections", "words"),
    [
        ("cen", {"hiden": [8]}, {}, ["model.options.hiden", "`hidden`"]),
        ("cen", {"steps": 8}, {}, ["model.options.steps", "learn.steps"]),
        ("cen", {}, {"model": {"kernel": "gaussian"}}, ["model.kernel", "'cen'"]),
        ("cen", {}, {"fit": {"solver": "nystrom"}}, ["fit.solver", "'cen'"]),
        ("cen", {}, {"learn": {"mode": "full"}}, ["learn.mode"]),
        ("cen", {}, {"learn": {"starts": [{"name": "a"}]}}, ["learn.starts"]),
        ("askl", {}, {"learn": {"steps": 5}}, ["learn.steps", "epochs"]),
        ("askl", {"loss": "hinge"}, {}, ["model.options.loss", "cross_entropy"]),
        ("mce", {"hidden": [8]}, {}, ["model.options", "cen"]),
        ("mce", {}, {"model": {"features": {"name": "random_fourier"}}}, ["model.features", "network"]),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(kind, options, sections, words, tmp_path):
    config = tree(tmp_path / "run", kind, options)
    for section, keys in sections.items():
        config[section] = {**config.get(section, {}), **keys}
    with pytest.raises(ConfigError) as caught:
        run(parse_config(config), name="iris")
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "run").exists()


def test_a_network_is_fitted_after_it_was_learned(tmp_path):
    config = parse_config(tree(tmp_path / "run", "cen", {"hidden": [8]}, learn={"steps": 5}))
    with pytest.raises(ConfigError, match=r"has no learned model of .* 'cen'; run `kme-dist learn`"):
        fit.run(config, name="iris")
    assert learn.run(config, name="iris")["steps"] == 5
    assert fit.run(config, name="iris")["solver"] == "features"
    assert kme_dist.load(tmp_path / "run" / "model.zarr").feature_names_in_[0] == "sepal length (cm)"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cen", "askl"])
def test_workers_never_show_in_a_run(kind, tmp_path, no_pictures):
    options = {"hidden": [8]} if kind == "cen" else {"features": 20, "epochs": 2}
    models = []
    for cluster in ({"kind": "serial"}, {"kind": "local", "workers": 2}):
        config = tree(tmp_path / cluster["kind"], kind, options, cluster=cluster)
        config["learn"] |= {"batches_per_step": 2} | ({"steps": 10} if kind == "cen" else {})
        models.append(kme_dist.load(run(parse_config(config), name="iris")["model"]))
    assert np.asarray(models[0].weights_).tobytes() == np.asarray(models[1].weights_).tobytes()
