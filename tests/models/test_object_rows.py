"""Texts, sequences and bags as rows of a classifier, through a kernel that takes them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import kme_dist as kme
from kme_dist.core.risk import merge_equal_rows
from kme_dist.errors import ConfigError, DataError
from kme_dist.kernels import Bags, Gaussian, Spectrum, from_config
from kme_dist.run.fit import Room, Size, choose

RNG = np.random.default_rng(0)
Y = np.arange(60) % 2
TEXTS = ["".join(RNG.choice(list("abcd" if c else "cdef"), RNG.integers(8, 15))) for c in Y]
SEQUENCES = [[f"word{letter}" for letter in text] for text in TEXTS]
BAGS = [RNG.normal(size=(RNG.integers(2, 9), 2)) * (1 + 2 * c) for c in Y]
BAGS_OF_TEXTS = [[text[:4], text[4:]] for text in TEXTS]
ROWS = {
    "texts": (Spectrum(p=2), TEXTS),
    "sequences": (Spectrum(p=2), SEQUENCES),
    "bags": (Bags(Gaussian()), BAGS),
    "bags of texts": (Bags(Spectrum(p=2)), BAGS_OF_TEXTS),
}


@pytest.mark.parametrize("name", ["texts", "bags"])
@pytest.mark.parametrize(
    ("settings", "given"),
    [
        *(
            ({"solver": solver, "centres": 10}, f"solver='{solver}'")
            for solver in ("nystrom", "pcg", "tiled", "falkon")
        ),
        ({"centres": 10}, "centres=10"),
    ],
)
def test_solvers_that_require_numbers_say_which_one_does_not(name, settings, given):
    kernel, rows = ROWS[name]
    fit = {"objective": "rcb", "steps": 0, **settings}
    with pytest.raises(ConfigError, match=f"{given} requires rows of numbers, .* use solver='cholesky' without"):
        kme.MCEClassifier(kernel, **fit).fit(rows, Y)
    exact = kme.MCEClassifier(kernel, objective="rcb", steps=0, solver="cholesky").fit(rows, Y)
    assert kme.MCEClassifier(kernel, objective="rcb", steps=0).fit(rows, Y).solver_ == exact.solver_ == "cholesky"


def test_many_rows_that_are_not_numbers_are_fitted_exactly_or_refused():
    assert choose("auto", Size(20_000, width=0, labelled=False)).solver == "cholesky"
    with pytest.raises(ConfigError, match=r"for 20000 rows, 1\.0 GB are available; fit fewer rows"):
        choose("auto", Size(20_000, width=0, labelled=False), room=Room(alone=10**9))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("objective", ["rcb", "median", "auto"])
def test_classes_are_learned_from_rows_that_are_not_numbers(name, objective, tmp_path):
    kernel, rows = ROWS[name]
    model = kme.MCEClassifier(kernel=kernel, objective=objective, steps=4).fit(rows[:40], Y[:40])
    assert not hasattr(model, "n_features_in_")
    found = model.predict_proba(rows[40:])
    assert (model.predict(rows[40:]) == Y[40:]).mean() >= 0.85
    model.save(tmp_path / "m.zarr")
    np.testing.assert_array_equal(kme.load(tmp_path / "m.zarr").predict_proba(rows[40:]), found)
    assert repr(model.kernel_) == repr(kernel) or objective != "median"


def test_the_decision_is_that_of_the_gram_matrix():
    """f = Kq (K + nλI)⁻¹ Y with the kernel and λ as given."""
    kernel = Spectrum(p=2)
    model = kme.MCEClassifier(kernel=kernel, regularization=0.1, steps=0, refit_regularization=False)
    model.set_params(objective="rcb", calibration="none").fit(TEXTS[:40], Y[:40])
    V = np.linalg.solve(kernel.gram(TEXTS[:40]) + 40 * 0.1 * np.eye(40), np.eye(2)[Y[:40]])
    np.testing.assert_allclose(
        model.decision_probabilities(TEXTS[40:]), kernel.gram(TEXTS[40:], TEXTS[:40]) @ V, atol=1e-6
    )


def test_a_kernel_of_bags_is_the_mean_over_pairs_of_members():
    kernel = Bags(Gaussian(length_scale=1.3, scale=0.7))
    K = kernel.gram(BAGS[:6], BAGS[6:10])
    for i, A in enumerate(BAGS[:6]):
        for j, B in enumerate(BAGS[6:10]):
            assert K[i, j] == pytest.approx(kernel.parts[0].gram(A, B).mean(), rel=1e-12)
    square = kernel.gram(BAGS[:12])
    np.testing.assert_allclose(np.diag(square), kernel.diag(BAGS[:12]), rtol=1e-12)
    assert np.linalg.eigvalsh(square).min() > -1e-12
    K_bar, gradient = RNG.normal(size=(6, 4)), kernel.vjp(BAGS[:6], BAGS[6:10], np.ones((6, 4)) * 0)
    assert set(gradient) == set(kernel.parameters) == {"0.length_scale", "0.scale"}
    gradient = kernel.vjp(BAGS[:6], BAGS[6:10], K_bar)
    for name, value in kernel.parameters.items():
        high, low = (
            (kernel.replace({name: value * np.exp(step)}).gram(BAGS[:6], BAGS[6:10]) * K_bar).sum()
            for step in (1e-5, -1e-5)
        )
        assert gradient[name] == pytest.approx((high - low) / 2e-5, rel=1e-6)
    assert from_config(kernel.to_config()) == kernel


def test_tiles_of_many_members_give_the_same_sums(monkeypatch):
    from kme_dist.core.kernels import bags

    kernel = Bags(Gaussian(length_scale=0.9))
    whole, gradient = kernel.gram(BAGS[:20], BAGS[20:]), kernel.vjp(BAGS[:20], BAGS[20:], np.ones((20, 40)))
    monkeypatch.setattr(bags, "_POINTS", 7)
    np.testing.assert_allclose(kernel.gram(BAGS[:20], BAGS[20:]), whole, rtol=1e-12)
    again = kernel.vjp(BAGS[:20], BAGS[20:], np.ones((20, 40)))
    np.testing.assert_allclose(again["0.length_scale"], gradient["0.length_scale"], rtol=1e-10)


def test_rows_come_in_any_container():
    wanted = kme.MCEClassifier(Spectrum(p=2), objective="median").fit(TEXTS, Y).predict_proba(TEXTS)
    for given in (np.array(TEXTS), np.array(TEXTS, dtype=object), pd.Series(TEXTS), tuple(TEXTS)):
        model = kme.MCEClassifier(Spectrum(p=2), objective="median").fit(given, Y)
        np.testing.assert_array_equal(model.predict_proba(given), wanted)


def test_weights_of_texts_are_copies_of_them():
    twice = kme.MCEClassifier(Spectrum(p=2), objective="rcb", steps=0).fit(TEXTS + TEXTS[:9], np.append(Y, Y[:9]))
    weighted = kme.MCEClassifier(Spectrum(p=2), objective="rcb", steps=0)
    weighted.fit(TEXTS, Y, sample_weight=1.0 + (np.arange(60) < 9))
    np.testing.assert_allclose(twice.decision_probabilities(TEXTS), weighted.decision_probabilities(TEXTS), atol=1e-5)
    merged = merge_equal_rows(["a", "b", "a", "c"], np.array([0, 0, 0, 1]), None)
    assert (merged.X, merged.weights.tolist()) == (["a", "b", "c"], [2, 1, 1])


def test_mistakes_are_told_the_way_out():
    model = kme.MCEClassifier(Spectrum(p=2), objective="median").fit(TEXTS, Y)
    with pytest.raises(DataError, match="was fitted to texts, sequences or bags"):
        model.predict(np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"texts are rows of MCEClassifier.*Spectrum\(p=2\)"):
        kme.MCEClassifier().fit(TEXTS, Y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        kme.MCEClassifier(Spectrum(p=2)).fit(TEXTS, Y[:-1])
    with pytest.raises(DataError, match="bag 1 is empty"):
        Bags(Gaussian()).gram([BAGS[0], BAGS[0][:0]])
    refitted = model.set_params(kernel=Gaussian()).fit(RNG.normal(size=(60, 3)), Y)
    assert refitted.n_features_in_ == 3


def test_batch_inference_takes_texts(tmp_path):
    texts, labels = ["abab", "abba", "xyxy", "yxxy"] * 6, ["p", "p", "q", "q"] * 6
    model = kme.MCEClassifier(kernel=kme.kernels.Spectrum(p=2), objective="rcb", steps=2).fit(texts, labels)
    wanted = model.predict_proba(texts)
    np.testing.assert_allclose(kme.predict(model, texts)["probability_p"].to_numpy(), wanted[:, 0], atol=1e-6)
    kme.predict(model, texts, tmp_path / "scores.zarr")
    np.testing.assert_allclose(kme.open_predictions(tmp_path / "scores.zarr").read("probability"), wanted, atol=1e-6)
    with pytest.raises(DataError, match="fitted to texts, sequences or bags; pass such rows"):
        kme.predict(model, np.ones((3, 2)))


def test_workers_give_the_same_bits():
    settings = {"kernel": Spectrum(p=2), "objective": "rcb", "steps": 2}
    alone = kme.MCEClassifier(**settings).fit(TEXTS, Y).predict_proba(TEXTS)
    np.testing.assert_array_equal(kme.MCEClassifier(**settings, n_jobs=2).fit(TEXTS, Y).predict_proba(TEXTS), alone)


SMALL = {"objective": "median"}
EQUAL = RNG.normal(size=(60, 4, 2)) * (1 + 2 * Y[:, None, None])


def with_bag(number, bag):
    return [*BAGS[:number], bag, *BAGS[number + 1 :]]


WRONG_BAGS = {
    "missing value": (np.array([[0.0, 1.0], [np.nan, 1.0]]), r"bag 41 has NaN or infinity in its member 1; remove"),
    "infinity": (np.array([[0.0, np.inf]]), r"bag 41 has NaN or infinity in its member 0; remove"),
    "width": (np.ones((2, 3)), r"bag 41 has members of 3 features, .* 2 features; pass bags of the same columns"),
    "one axis": (np.arange(3.0), r"bag 41 has the shape \(3,\), .* bag\.reshape\(-1, 1\)"),
    "texts": (["a", "b"], r"bag 41 has members of texts, .* 2 features"),
    "empty": (np.ones((0, 2)), r"bag 41 is empty; .* leave it out"),
    "ragged": ([[1.0, 2.0], [1.0]], r"bag 41 has members of several lengths"),
    "objects": (np.array([[1.0, None]], dtype=object), r"bag 41 \(shape \(1, 2\), object\) has no numbers"),
}


@pytest.mark.parametrize("what", WRONG_BAGS)
def test_a_wrong_bag_is_named_at_fit_and_later(what):
    bag, message = WRONG_BAGS[what]
    rows, kernel = with_bag(41, bag), Bags(Gaussian())
    model = kme.MCEClassifier(kernel, **SMALL).fit(BAGS, Y)
    mean = kme.KernelMean(kernel=kernel).fit(BAGS)
    embedding = kme.ConditionalMeanEmbedding(kernel, regularization=0.1).fit(BAGS, 1.0 * Y)
    calls = [
        lambda: kme.MCEClassifier(kernel, **SMALL).fit(rows, Y),
        lambda: model.predict(rows),
        lambda: model.predict_proba(rows),
        lambda: kme.KernelMean(kernel=kernel).fit(rows),
        lambda: mean.evaluate(rows),
        lambda: kme.ConditionalMeanEmbedding(kernel).fit(rows, 1.0 * Y),
        lambda: embedding.predict(rows),
        lambda: kme.mmd_test(BAGS, rows, kernel),
    ]
    for call in calls:
        with pytest.raises(DataError, match=message):
            call()
    if what not in ("missing value", "infinity"):
        with pytest.raises(DataError, match=message):
            kme.predict(model, rows)


def test_all_new_bags_of_another_width_are_refused():
    model = kme.MCEClassifier(Bags(Gaussian()), **SMALL).fit(BAGS, Y)
    with pytest.raises(DataError, match=r"bag 0 has members of 3 features, those of the fit have 2 features"):
        model.predict([np.ones((2, 3))])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_batch_inference_leaves_out_bags_that_are_not_finite(value):
    model = kme.MCEClassifier(Bags(Gaussian()), **SMALL).fit(BAGS, Y)
    rows = with_bag(1, np.array([[0.0, 1.0], [1.0, value]]))
    with pytest.warns(UserWarning, match=rf"no prediction for 1 row; .* row 1: member 1 of the bag: .* {value}"):
        found = kme.predict(model, rows)
    assert found["label"].to_pylist()[1] is None
    np.testing.assert_allclose(
        np.delete(found["probability_1"].to_numpy(), 1), np.delete(model.predict_proba(BAGS)[:, 1], 1), atol=1e-6
    )


def test_an_array_of_bags_is_a_list_of_them():
    for make in (
        lambda rows: kme.MCEClassifier(Bags(Gaussian()), **SMALL).fit(rows, Y).predict_proba(rows),
        lambda rows: kme.KernelMean(kernel=Bags(Gaussian())).fit(rows).evaluate(rows),
        lambda rows: kme.ConditionalMeanEmbedding(Bags(Gaussian())).fit(rows, 1.0 * Y).predict(rows),
        lambda rows: kme.mmd_test(rows[:30], rows[30:], Bags(Gaussian())).statistic,
    ):
        np.testing.assert_array_equal(make(EQUAL), make(list(EQUAL)))
    model = kme.MCEClassifier(Bags(Gaussian()), **SMALL).fit(EQUAL, Y)
    assert kme.predict(model, EQUAL).equals(kme.predict(model, list(EQUAL)))


@pytest.mark.parametrize("rows", [BAGS, EQUAL, list(EQUAL)], ids=["several sizes", "array", "list"])
def test_bags_without_a_kernel_of_bags_are_told_of_one(rows):
    bags = r"Bags\(kme_dist\.kernels\.Gaussian\(\)\)"
    for make in (kme.MCEClassifier, lambda: kme.MCEClassifier(Gaussian()), kme.CMERegressor):
        with pytest.raises(DataError, match=rf"takes rows of numbers here, got bags: row 0 has .*{bags}"):
            make().fit(rows, Y)
    for make in (kme.KernelMean, lambda: kme.ConditionalMeanEmbedding(Gaussian())):
        with pytest.raises(DataError, match=rf"rows are bags .* Gaussian does not take them; .*{bags}"):
            make().fit(rows, Y)
    fitted = kme.MCEClassifier(**SMALL, steps=0).fit(EQUAL[:, 0], Y)
    with pytest.raises(DataError, match="takes rows of numbers here, got bags"):
        fitted.predict(rows)


def test_rows_of_several_lengths_are_named():
    with pytest.raises(DataError, match=r"row 0 has 2, row 2 has 3; fill them up"):
        kme.MCEClassifier().fit([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0, 3.0]], [0, 1, 0])
    with pytest.raises(DataError, match=r"takes a list of bags, got an array of shape \(60, 2\)"):
        kme.KernelMean(kernel=Bags(Gaussian())).fit(EQUAL[:, 0])
    with pytest.raises(DataError, match=r"bag 0 has members such as 'ab'.*Bags\(kme_dist\.kernels\.Spectrum"):
        kme.KernelMean(kernel=Bags(Gaussian())).fit([["ab"], ["cd"]])


@pytest.mark.parametrize("stray", [None, 3, np.nan], ids=str)
@pytest.mark.parametrize("kind", [list, lambda rows: pd.Series(rows, dtype=object)], ids=["list", "series"])
def test_the_row_that_is_no_text_is_named(stray, kind):
    kernel, rows = Spectrum(p=2), kind([*TEXTS[:41], stray, *TEXTS[42:]])
    model = kme.MCEClassifier(kernel, **SMALL).fit(TEXTS, Y)
    calls = [
        lambda: kme.MCEClassifier(kernel, **SMALL).fit(rows, Y),
        lambda: model.predict(rows),
        lambda: kme.predict(model, rows),
        lambda: kme.KernelMean(kernel=kernel).fit(rows),
        lambda: kme.ConditionalMeanEmbedding(kernel).fit(rows, Y),
        lambda: kme.ConditionalMeanEmbedding(target_kernel=kernel).fit(EQUAL[:, 0], rows),
        lambda: kme.mmd_test(TEXTS, rows, kernel),
        lambda: kme.SupportMeasureClassifier(kernel).fit([TEXTS, rows], [0, 1]),
    ]
    for call in calls:
        with pytest.raises(DataError, match=rf"row 41 is {stray!r} \({type(stray).__name__}\) among texts; remove"):
            call()
