"""`kme-dist fit`: a model from what was learned, brought up to date without a second look at old rows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kme_dist import MCEClassifier, kernels, load
from kme_dist.cli.app import execute
from kme_dist.config import load_config
from kme_dist.data.ingest import ingest
from kme_dist.data.store import load_arrays, save_arrays
from kme_dist.errors import ConfigError
from kme_dist.pipelines import fit, learn

CONFIG = """
data: {{source: {source}}}
model: {{kernel: {{name: gaussian, ard: true, length_scale: 0.5}}, regularization: 1.0e-3}}
learn: {{steps: 3, batch_size: 80, seed: 1}}
fit: {{solver: nystrom, centres: 40}}
cluster: {{kind: serial}}
output: {{folder: {folder}}}
"""


def table(n, seed):
    rng = np.random.default_rng(seed)
    X = rng.random((n, 3)).astype(np.float32)
    return X, np.concatenate([[0, 1], (2 * X[2:, 0]).astype(int)])


def stored(place, n, seed, **more):
    return ingest(table(n, seed), place, chunk_bytes=600, shard_bytes=2400, **more)


@pytest.fixture
def data(tmp_path):
    return stored(tmp_path / "d.zarr", 400, 1, shuffle=0)


@pytest.fixture
def config(data, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG.format(source=data.path, folder=tmp_path / "run"))
    return path


def run(config, *changes, **more):
    return fit.run(load_config(config, changes), name="small", **more)


def test_the_model_uses_what_was_learned(config, tmp_path):
    learned = learn.run(load_config(config), name="small")
    result = run(config)
    model = load(tmp_path / "run" / "model.zarr")
    assert model.kernel_ == kernels.from_config(learned["kernel"])
    shift = load_arrays(tmp_path / "run" / "learned.zarr")[0]["scaling/shift"]
    np.testing.assert_array_equal(model.scaling_.shift, shift)
    X, y = table(400, 1)
    assert np.mean(model.predict(X) == y) > 0.9
    assert (result["solver"], result["reason"], result["rows"]) == ("nystrom", "requested", 400)
    assert result["residual"] < 1e-4
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["stages"]["fit"]["result"]["regularization"] == model.regularization_
    assert not (tmp_path / "run" / "scratch").exists()


def test_without_learning_the_kernel_is_that_of_the_config(config, tmp_path):
    run(config, "fit.refit_regularization=false", "fit.solver=cholesky")
    model = load(tmp_path / "run" / "model.zarr")
    assert model.kernel_ == kernels.Gaussian(length_scale=np.full(3, 0.5))
    assert model.regularization_ == 1e-3
    assert not (tmp_path / "run" / "statistics.zarr").exists()


@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg"])
def test_every_solver_leaves_a_model_that_predicts(solver, config, tmp_path):
    assert run(config, f"fit.solver={solver}", "fit.tile_rows=150")["solver"] == solver
    X, y = table(200, 7)
    assert np.mean(load(tmp_path / "run" / "model.zarr").predict(X) == y) > 0.9


def test_the_same_command_again_finds_it_done(config, tmp_path):
    first = run(config)
    stamp = (tmp_path / "run" / "model.zarr" / "zarr.json").stat().st_mtime_ns
    assert run(config) == first
    assert (tmp_path / "run" / "model.zarr" / "zarr.json").stat().st_mtime_ns == stamp
    assert run(config, "fit.centres=30")["centres"] == 30


def test_an_update_equals_a_fit_from_scratch(config, data, tmp_path):
    fixed = "fit.refit_regularization=false"
    run(config, fixed)
    data.append(table(130, 2))
    changed = run(config, fixed, update=True)
    assert (changed["added_rows"], changed["rows"]) == (130, 530)
    updated = load(tmp_path / "run" / "model.zarr")
    X = table(100, 9)[0]
    again = run(config, fixed, update=True)
    assert again["added_rows"] == 0
    np.testing.assert_array_equal(load(tmp_path / "run" / "model.zarr").predict_proba(X), updated.predict_proba(X))
    # From scratch with the same centres: take everything out of the model and put it all in again.
    other = stored(tmp_path / "other.zarr", 64, 3)
    run(config, f"data.source={other.path}", fixed, update=True)
    run(config, fixed, update=True, remove=other.path)
    back = load(tmp_path / "run" / "model.zarr")
    assert np.abs(back.decision_probabilities(X) - updated.decision_probabilities(X)).max() < 1e-8


def weighted_solution(model, X, y, factors):
    """f at X by the equations of weighted centres, in plain NumPy."""
    P, kernel = model.embedding_.centres.astype(np.float64), model.kernel_
    K, w = kernel(model.scaling_.apply(X, "float64"), P), np.asarray(factors)[y]
    A = K.T @ (w[:, None] * K) + w.sum() * model.regularization_ * kernel(P, P)
    return K @ np.linalg.solve(A, K.T @ (w[:, None] * np.eye(2)[y]))


@pytest.mark.parametrize("weights", ["balanced", "{0: 1.0, 1: 4.0}"])
def test_updates_count_no_row_twice_and_keep_the_weights_of_classes(weights, config, data, tmp_path):
    """Balanced factors change with every row that is appended: those of the fit stay, as kernel and centres do."""
    changes = ["fit.refit_regularization=false", "model.dtype=float64", f"model.class_weight={weights}"]
    (X, y), (more, own) = table(400, 1), table(130, 2)
    few = own == 1  # so that balanced factors differ
    run(config, *changes)
    counts = np.bincount(y)
    factors = 400 / (2 * counts) if weights == "balanced" else [1.0, 4.0]
    model = load(tmp_path / "run" / "model.zarr")
    np.testing.assert_allclose(model.decision_probabilities(X), weighted_solution(model, X, y, factors), atol=1e-8)
    assert run(config, *changes, update=True)["added_rows"] == 0
    data.append((more[few], own[few]))
    assert run(config, *changes, update=True)["added_rows"] == few.sum()
    updated = load(tmp_path / "run" / "model.zarr")
    both = np.concatenate([X, more[few]]), np.concatenate([y, own[few]])
    np.testing.assert_allclose(
        updated.decision_probabilities(both[0]), weighted_solution(updated, *both, factors), atol=1e-8
    )
    year = stored(tmp_path / "year.zarr", 64, 3)
    assert run(config, *changes, f"data.source={year.path}", update=True)["added_rows"] == 64
    assert run(config, *changes, update=True, remove=year.path)["removed_rows"] == 64
    back = load(tmp_path / "run" / "model.zarr")
    assert np.abs(back.decision_probabilities(X) - updated.decision_probabilities(X)).max() < 1e-8


def test_an_update_with_other_weights_of_classes_is_refused(config, tmp_path):
    run(config)
    with pytest.raises(ConfigError, match=r"model.class_weight is 'balanced', and .* by no class weights"):
        run(config, "model.class_weight=balanced", update=True)
    run(config, "model.class_weight={1: 3.0}", fresh=True)
    with pytest.raises(ConfigError, match=r"is None, and the sums of .* weighted by \[1.0, 3.0\]; restore"):
        run(config, update=True)


def test_models_that_weigh_classes_differently_do_not_merge(config, tmp_path):
    import shutil

    run(config, "model.class_weight={1: 3.0}")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    arrays, facts = load_arrays(tmp_path / "other" / "statistics.zarr")
    save_arrays(tmp_path / "other" / "statistics.zarr", arrays, {**facts, "class_factors": [1.0, 2.0]})
    with pytest.raises(ConfigError, match=r"weigh classes differently, \(1.0, 3.0\) and \(1.0, 2.0\)"):
        run(config, "model.class_weight={1: 3.0}", update=True, merge=str(tmp_path / "other"))


@pytest.mark.parametrize("solver", ["nystrom", "auto"])
def test_an_update_of_a_linear_kernel_keeps_its_regularization(solver, config, data, tmp_path):
    """Features φ with k = variance φ·φ are solved with λ / variance; λ of the model is that of the kernel."""
    changes = [
        "model.kernel={name: linear, scale: 3.0}",
        "model.dtype=float64",
        "model.scaling=null",
        "fit.refit_regularization=false",
        f"fit.solver={solver}",
        f"fit.centres={'null' if solver == 'auto' else 40}",
    ]
    run(config, *changes)
    model = load(tmp_path / "run" / "model.zarr")
    data.append(table(130, 2))
    assert run(config, *changes, update=True)["added_rows"] == 130
    updated = load(tmp_path / "run" / "model.zarr")
    assert updated.regularization_ == pytest.approx(model.regularization_)
    assert updated.embedding_.regularization == pytest.approx(model.embedding_.regularization)
    run(config, *changes, fresh=True)
    again, X = load(tmp_path / "run" / "model.zarr"), table(100, 9)[0]
    assert np.abs(updated.decision_probabilities(X) - again.decision_probabilities(X)).max() < 1e-8


def test_models_of_two_places_become_one(config, data, tmp_path):
    """Both start from the same model; each sees chunks of its own."""
    import shutil

    fixed = "fit.refit_regularization=false"
    run(config, fixed)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    here, there = stored(tmp_path / "here.zarr", 96, 4), stored(tmp_path / "there.zarr", 64, 5)
    run(config, fixed, f"data.source={here.path}", update=True)
    run(config, fixed, f"data.source={there.path}", f"output.folder={tmp_path / 'other'}", update=True)
    run(config, fixed, f"output.folder={tmp_path / 'other'}", update=True, remove=data.path)
    result = run(config, fixed, f"data.source={here.path}", update=True, merge=str(tmp_path / "other"))
    assert (result["merged_rows"], result["rows"]) == (64, 560)
    merged = load(tmp_path / "run" / "model.zarr")
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    X = table(50, 9)[0]
    run(config, fixed, f"data.source={there.path}", update=True)
    assert np.array_equal(load(tmp_path / "run" / "model.zarr").predict(X), merged.predict(X)), (
        "nothing was left to add"
    )


SPECTRAL = """
data: {{source: {source}}}
model: {{features: spectral}}
cluster: {{kind: serial}}
output: {{folder: {folder}}}
"""


def test_learned_spectral_features_are_fitted_and_updated(data, tmp_path):
    config = tmp_path / "spectral.yaml"
    config.write_text(SPECTRAL.format(source=data.path, folder=tmp_path / "run"))
    learned = learn.run(load_config(config), name="spectral")
    assert learned["steps"] == 64
    assert run(config)["solver"] == "features"
    model, (X, y) = load(tmp_path / "run" / "model.zarr"), table(200, 7)
    assert np.mean(model.predict(X) == y) > 0.9
    alone = MCEClassifier(features="spectral").fit(data)
    assert model.predict_proba(X).tobytes() == alone.predict_proba(X).tobytes()
    data.append(table(130, 2))
    result = run(config, update=True)
    assert (result["added_rows"], result["rows"]) == (130, 530)
    updated = load(tmp_path / "run" / "model.zarr")
    for name, value in model.scaling_.arrays.items():
        np.testing.assert_array_equal(updated.scaling_.arrays[name], value)
    Z = updated.scaling_.apply(np.concatenate([table(400, 1)[0], table(130, 2)[0]]), "float64")
    Y = np.eye(2)[np.concatenate([table(400, 1)[1], table(130, 2)[1]])]
    A = Z.T @ Z + 530 * updated.regularization_ * np.eye(Z.shape[1])
    assert np.linalg.norm(A @ updated.embedding_.weights - Z.T @ Y) < 1e-3 * np.linalg.norm(Z.T @ Y)


@pytest.mark.parametrize("key", ["model.kernel=gaussian", "learn.steps=5", "fit.centres=10", "learn.mode=full"])
def test_spectral_features_refuse_settings_that_they_do_not_have(key, data, tmp_path):
    config = tmp_path / "spectral.yaml"
    config.write_text(SPECTRAL.format(source=data.path, folder=tmp_path / "run"))
    with pytest.raises(ConfigError, match=f"spectral, which has no {key.partition('=')[0]}; remove it"):
        run(config, key)


def test_explicit_features_are_fitted_and_updated_too(config, data, tmp_path):
    full = [
        "learn.mode=full",
        "model.objective=rcb",
        "model.dtype=float64",
        "model.features={name: random_fourier, features: 60}",
    ]
    learn.run(load_config(config, full), name="small")
    assert run(config, *full)["solver"] == "features"
    X, y = table(200, 7)
    model = load(tmp_path / "run" / "model.zarr")
    assert np.mean(model.predict(X) == y) > 0.9
    data.append(table(130, 2))
    assert run(config, *full, update=True)["rows"] == 530
    updated = load(tmp_path / "run" / "model.zarr")
    np.testing.assert_array_equal(updated.features_.forward(X), model.features_.forward(X))
    Z = updated.features_.forward(
        updated.scaling_.apply(np.concatenate([table(400, 1)[0], table(130, 2)[0]]), "float64")
    )
    y = np.concatenate([table(400, 1)[1], table(130, 2)[1]])
    W = np.linalg.solve(Z.T @ Z + 530 * updated.regularization_ * np.eye(Z.shape[1]), Z.T @ np.eye(2)[y])
    np.testing.assert_allclose(updated.weights_, W, atol=1e-2 * np.abs(W).max())


def test_mistakes_are_said_in_one_line(config, data, tmp_path, capsys):
    with pytest.raises(ConfigError, match="require --update"):
        run(config, remove=data.path)
    with pytest.raises(ConfigError, match="has no sums to update"):
        run(config, update=True)
    first = run(config)
    strange = ingest((table(40, 1)[0], np.arange(40) % 3), tmp_path / "three.zarr")
    with pytest.raises(ConfigError, match="only chunks with the same classes"):
        run(config, f"data.source={strange.path}", update=True)
    assert run(config) == first, "the fit is still on record"
    capsys.readouterr()
    assert execute(["fit", str(config), "--set", "fit.memory=lots"]) == 2
    assert "fit.memory is 'lots'" in capsys.readouterr().err


def test_the_command_prints_what_it_did(config, capsys):
    assert execute(["fit", str(config), "--quiet"]) == 0
    assert "nystrom (requested) on 400 rows" in capsys.readouterr().out
    assert execute(["fit", str(config), "--update", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["added_rows"] == 0


@pytest.mark.parametrize("solver", ["nystrom", "pcg"])
def test_files_of_a_killed_fit_are_gone_after_the_next(solver, config, tmp_path):
    learn.run(load_config(config), name="small")
    left = tmp_path / "run" / "scratch" / "pcg-0123" / "K-0-0.npy"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"tiles of a fit that was killed")
    run(config, f"fit.solver={solver}", "fit.centres=null" if solver == "pcg" else "fit.centres=40")
    assert not left.exists()
    assert (tmp_path / "run" / "model.zarr").exists()
