"""What callers hand in: rows in any form, dates and mixed labels refused by name, names and widths kept and checked."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import kme_dist as kme
from kme_dist.data.validation import as_rows, as_values, check_columns, check_labels
from kme_dist.errors import DataError

X = np.random.default_rng(0).normal(size=(40, 3))
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).astype(int)
FRAME = pd.DataFrame(X, columns=["width", "height", "age"])
KERNEL = kme.kernels.Gaussian(1.0)
CEN = {"hidden": (4,), "steps": 3}
ASKL = {"features": 8, "epochs": 1}

# name -> (estimator, its targets, what to ask)
MODELS = {
    "conditional": (lambda: kme.ConditionalMeanEmbedding(KERNEL, regularization=0.1), X[:, 1], "predict"),
    "sums": (lambda: kme.ConditionalMeanEmbedding(KERNEL, regularization=0.1, centres=20), X[:, 1], "predict"),
    "mean": (lambda: kme.KernelMean("r-kmse"), None, "evaluate"),
    "parzen": (lambda: kme.ParzenClassifier(folds=2), Y, "predict"),
    "mixture": (lambda: kme.MixtureMatching(2, starts=1), None, "score_samples"),
    "askl": (lambda: kme.ASKLClassifier(**ASKL), Y, "predict"),
    "askl numbers": (lambda: kme.ASKLRegressor(**ASKL), X[:, 1], "predict"),
    "cen": (lambda: kme.CENClassifier(**CEN), Y, "predict"),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_travel_with_every_model(name, tmp_path):
    make, targets, ask = MODELS[name]
    model = make().fit(FRAME, targets)
    model.save(tmp_path / "model.zarr")
    for each in (model, kme.load(tmp_path / "model.zarr")):
        assert list(each.feature_names_in_) == ["width", "height", "age"]
        assert each.n_features_in_ == 3
        np.testing.assert_allclose(getattr(each, ask)(FRAME[:5]), getattr(model, ask)(FRAME[:5]), rtol=1e-9)
        with pytest.raises(DataError, match=r"(?s)same order.*X\[model\.feature_names_in_\]"):
            getattr(each, ask)(FRAME[["age", "height", "width"]])
        with pytest.raises(ValueError, match="unseen at fit time"):
            getattr(each, ask)(FRAME.rename(columns={"age": "years"}))
        with pytest.warns(UserWarning, match="does not have valid feature names"):
            getattr(each, ask)(X[:5])
    again = make().fit(X, targets)  # nameless rows have no names, also after a save
    again.save(tmp_path / "again.zarr")
    assert not hasattr(kme.load(tmp_path / "again.zarr"), "feature_names_in_")
    assert not hasattr(model.fit(X, targets), "feature_names_in_")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.nan, "Input X contains NaN: NaN in row 7, column {}; arrays must be complete"),
        (np.inf, "infinity.*: inf in"),
    ],
)
def test_a_value_that_is_not_finite_is_named_by_row_and_column(value, words):
    holed, frame = X.copy(), FRAME.copy()
    holed[7, 1] = holed[9, 0] = value
    frame.iloc[7, 1] = frame.iloc[9, 0] = value
    model = kme.CENClassifier(**CEN)
    with pytest.raises(DataError, match=words.format(1)) as refused:
        model.fit(holed, Y)
    assert "HistGradientBoosting" not in str(refused.value)
    assert ("pass a data frame" in str(refused.value)) == np.isnan(value)
    with pytest.raises(DataError, match=r"(NaN|inf) in row 7, column 'height'"):
        model.fit(FRAME, Y).predict(frame)
    targets = X[:, 0].copy()
    targets[3] = value
    with pytest.raises(DataError, match=r"Input y contains .* in row 3; remove such rows, or give them a target"):
        kme.ASKLRegressor(**ASKL).fit(X, targets)
    with pytest.raises(DataError, match=r"contain NaN or infinity: .* in row 3"):
        kme.KernelMean("r-kmse").fit(np.stack([targets, targets], axis=1))


def test_a_value_of_a_sparse_table_that_is_not_finite_is_named_too():
    holed = sparse.csr_array(X)
    holed[7, 1] = np.nan
    with pytest.raises(DataError, match="NaN in row 7, column 1"):
        kme.MCEClassifier(steps=0).fit(holed, Y)


@pytest.mark.parametrize("name", MODELS)
def test_another_width_is_an_error_that_names_both(name, tmp_path):
    make, targets, ask = MODELS[name]
    model = make().fit(X, targets)
    model.save(tmp_path / "model.zarr")
    for each in (model, kme.load(tmp_path / "model.zarr")):
        with pytest.raises(ValueError, match=r"2 features.*3 features"):
            getattr(each, ask)(X[:5, :2])


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("parzen",)])
def test_the_names_of_a_data_set_are_the_names_of_the_model(name, tmp_path):
    make, targets, ask = MODELS[name]
    table = FRAME.assign(target=X[:, 1] if targets is None else targets)
    table.to_csv(tmp_path / "rows.csv", index=False)
    task = "classification" if targets is Y else "regression"
    data = kme.ingest(tmp_path / "rows.csv", tmp_path / "rows.zarr", label="target", task=task, dtype="float64")
    model = make().fit(data)
    assert list(model.feature_names_in_) == ["width", "height", "age"]
    with pytest.raises(ValueError, match="same order"):
        getattr(model, ask)(FRAME[["age", "height", "width"]])
    getattr(model, ask)(X[:5])  # as the data set's own rows are read: no warning
    model.save(tmp_path / "model.zarr")
    getattr(kme.load(tmp_path / "model.zarr"), ask)(X[:5])
    with pytest.raises(ValueError, match=r"2 features.*3 features"):
        getattr(model, ask)(X[:5, :2])
    np.savez(tmp_path / "plain.npz", X=X, y=table["target"])
    plain = kme.ingest(tmp_path / "plain.npz", tmp_path / "plain.zarr", label="y", task=task, dtype="float64")
    model = make().fit(plain)  # x0, x1, x2 stand for positions
    assert model.n_features_in_ == 3
    assert not hasattr(model, "feature_names_in_")


def test_columns_that_are_targets_have_no_part_in_the_names(tmp_path):
    FRAME.to_csv(tmp_path / "rows.csv", index=False)
    data = kme.ingest(tmp_path / "rows.csv", tmp_path / "rows.zarr", dtype="float64")
    model = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.1, centres=20).fit(data, ["height"])
    assert list(model.feature_names_in_) == ["width", "age"]
    model.predict(FRAME[["width", "age"]])


def test_a_sparse_form_has_the_names_of_the_dense_one():
    model = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.1).fit(FRAME, X[:, 1])
    form = model.sparsify(gammas=[0.5], steps=20)[0]
    with pytest.raises(ValueError, match="same order"):
        form.predict(FRAME[["age", "height", "width"]])


def test_bags_have_names_too(tmp_path):
    bags = [FRAME[i : i + 5] * (1 + i % 2) for i in range(0, 35, 5)]
    model = kme.SupportMeasureClassifier().fit(bags, [0, 1, 0, 1, 0, 1, 0])
    model.save(tmp_path / "model.zarr")
    for each in (model, kme.load(tmp_path / "model.zarr")):
        assert list(each.feature_names_in_) == ["width", "height", "age"]
        assert each.predict(bags).shape == (7,)
        with pytest.raises(DataError, match=r"bag 1: .*\n.*same order"):
            each.predict([bags[0], bags[1][["age", "height", "width"]]])
        with pytest.raises(DataError, match=r"bag 0: .*names"):
            each.predict([bags[0][["age", "height"]]])
    plain = kme.SupportMeasureClassifier().fit([bag.to_numpy() for bag in bags], [0, 1, 0, 1, 0, 1, 0])
    with pytest.raises(DataError, match=r"2 features.*3 features"):
        plain.predict([X[:4, :2]])
    with pytest.raises(DataError, match="labels mix types"):
        kme.SupportMeasureClassifier().fit(bags, [0, "a", 0, 1, 0, 1, 0])


def test_two_samples_need_the_same_columns():
    with pytest.raises(DataError, match="first sample has 3 features, the second 2"):
        kme.mmd_test(X, X[:, :2])
    with pytest.raises(DataError, match="first sample has 3 features, the second no numeric features"):
        kme.mmd_test(X, ["ab", "ba"])
    with pytest.raises(DataError, match="reorder them"):
        kme.mmd_test(FRAME, FRAME[["age", "height", "width"]])
    assert kme.mmd_test(FRAME[:20], X[20:].tolist()).p_value > 0


def test_means_of_other_widths_are_not_compared():
    with pytest.raises(DataError, match="3 features, the other 2"):
        kme.KernelMean("kme", KERNEL).fit(X).distance(kme.KernelMean("kme", KERNEL).fit(X[:, :2]))


# --- rows in any form -------------------------------------------------------------------------------------------


def test_a_table_of_numbers_is_one_however_it_comes():
    numbers = [[1.0, 2.0], [3.0, 4.0]]
    for given in (
        numbers, tuple(map(tuple, numbers)), [np.array(row) for row in numbers], np.asfortranarray(numbers),
        np.array(numbers, dtype=object), pd.DataFrame(numbers), pd.DataFrame(numbers, dtype="Float64"),
        pd.DataFrame({"a": [1, 3], "b": [Decimal(2), Decimal(4)]}), np.array(numbers, dtype=np.float32),
    ):  # fmt: skip
        found = as_rows(given)
        assert found.dtype == np.float64
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, numbers)
    for other in (["ab", "ba"], [[1, 2], [1, 2, 3]], [1, 2, 3]):  # for the kernel to judge
        assert as_rows(other) is other
    assert as_rows(pd.Series(["ab", "ba"])) == ["ab", "ba"]
    with pytest.raises(DataError, match=r"shape \(rows, features\).*reshape"):
        as_rows(np.zeros(3))
    with pytest.raises(DataError, match="NaN"):
        as_rows(pd.DataFrame({"a": [1, None], "b": [1, 2]}, dtype="Int64"))
    with pytest.raises(DataError, match=r"'kind' holds 'b' \(str\) in row 1"):
        as_rows(pd.DataFrame({"size": [1.0, 2.0], "kind": [0, "b"]}))


def test_targets_too():
    np.testing.assert_array_equal(as_values([1, 2.5]), [1.0, 2.5])
    np.testing.assert_array_equal(as_values([[1, 2], [3, 4]]), [[1, 2], [3, 4]])
    assert as_values(["a", "b"]) == ["a", "b"]
    with pytest.raises(DataError, match="dates"):
        as_values(np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[D]"))
    with pytest.raises(DataError, match="NaN"):
        as_values([1.0, None])


def test_a_query_may_be_a_list_as_the_rows_of_the_fit_may():
    model = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.1).fit(X.tolist(), X[:, 1].tolist())
    expected = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.1).fit(X, X[:, 1])
    np.testing.assert_array_equal(model.predict(X[:4].tolist()), expected.predict(X[:4]))
    np.testing.assert_array_equal(model.evaluate(X[:4].tolist(), [0.5]), expected.evaluate(X[:4], np.array([0.5])))
    with pytest.raises(DataError, match="rows of 3 numbers"):
        model.predict(["text"])
    with pytest.raises(DataError, match="widths must be equal"):
        model.errors(X[:4], X[:4, :2])
    with pytest.raises(DataError, match="must be equal"):
        model.errors(X[:4], X[:3, 0])


DATES = pd.DataFrame({"size": X[:, 0], "when": pd.date_range("2024-01-01", periods=40)})


@pytest.mark.parametrize("name", MODELS)
def test_a_column_of_dates_is_encoded_or_named(name):
    make, targets, ask = MODELS[name]
    if name in ("parzen", "askl", "askl numbers", "cen"):
        model = make().fit(DATES, targets)
        assert model.encoded_feature_names_[:2] == ["size", "when"]
        given = getattr(model, ask)
        np.testing.assert_array_equal(given(DATES[["when", "size"]]), given(DATES))
    else:
        with pytest.raises(DataError, match=r"column 'when' holds dates.*convert it first"):
            make().fit(DATES, targets)
    with pytest.raises(DataError, match="column 'when' holds dates"):
        getattr(make().fit(DATES.assign(when=X[:, 1]), targets), ask)(DATES)


def test_durations_are_found_and_told_the_way_to_seconds():
    given = DATES.assign(when=DATES["when"] - DATES["when"][0])
    with pytest.raises(DataError, match=r"column 'when' holds durations .*\(seconds: X\['when'\] / numpy\.timedelta64"):
        as_rows(given)
    rows = given.assign(when=given["when"] / np.timedelta64(1, "s"))
    assert as_rows(rows).shape[0] == len(given)


def test_dates_are_found_in_any_table():
    for given in (
        DATES.assign(when=[date(2024, 1, 1)] * 40),
        DATES.assign(when=DATES["when"].dt.tz_localize("UTC")), DATES.assign(when=DATES["when"].dt.to_period("D")),
    ):  # fmt: skip
        with pytest.raises(DataError, match="column 'when' holds dates"):
            check_columns(given)
    with pytest.raises(DataError, match="column 1 holds dates"):
        check_columns([[1.0, date(2024, 1, 1)]])
    with pytest.raises(DataError, match="column 1 holds dates"):
        check_columns(np.array([[1.0, date(2024, 1, 1)]], dtype=object))
    with pytest.raises(DataError, match="column 0 holds dates"):
        check_columns(DATES["when"].to_numpy()[:, None])
    days = DATES["when"].astype("datetime64[s]").astype("int64") / 86_400  # the way out that the message shows
    check_columns(DATES.assign(when=days))
    assert days[1] - days[0] == 1


@pytest.mark.parametrize("labels", [[1, "a"] * 20, np.array([1, "a"] * 20, dtype=object), pd.Series([1, "a"] * 20)])
@pytest.mark.parametrize("name", ["parzen", "askl", "cen"])
def test_labels_of_two_types_are_named(name, labels):
    with pytest.raises(DataError, match=r"labels mix types: 1 \(int\) in row 0 and 'a' \(str\) in row 1.*all texts"):
        MODELS[name][0]().fit(X, labels)
    with pytest.raises(DataError, match="labels mix types"):
        kme.ConditionalMeanEmbedding(KERNEL, "delta", 0.1).fit(X, labels)


def test_labels_that_can_be_ordered_pass():
    for labels in ([1, 2, 2], ["a", "b"], [True, False], np.array(["a", "b"]), pd.Series(["a", "b"], dtype="category")):
        check_labels(labels)
    check_labels(None)
    check_labels([1, 2.5])
    check_labels([[0, 1], [1, 0]])
    with pytest.raises(DataError, match="label of row 1 is missing"):
        check_labels(["a", None])
    with pytest.raises(DataError, match="dates"):
        check_labels(np.array(["2024-01-01"], dtype="datetime64[D]"))
    with pytest.raises(DataError, match=r"row 0 is datetime.date"):
        check_labels([date(2024, 1, 1)])


# --- data sets, paths and texts in the wrong place -----------------------------------------------------------


@pytest.mark.parametrize("name", ["parzen", "askl", "askl numbers", "cen"])
def test_a_data_set_to_predict_is_told_how(name, tmp_path):
    make, targets, ask = MODELS[name]
    model, data = make().fit(X, targets), kme.ingest(X, tmp_path / "rows.zarr")
    for given, read in ((data, r"data\.read\(\)"), (data.path, r"kme_dist\.open_dataset\(data\)\.read\(\)")):
        with pytest.raises(DataError, match=rf"rows\.zarr; read its rows: X, y = {read}") as error:
            getattr(model, ask)(given)
        assert ("kme_dist.predict(model, data, out)" in str(error.value)) == (name in ("askl", "cen"))


@pytest.mark.parametrize("name", MODELS)
def test_a_path_to_fit_is_told_to_be_opened(name):
    make, _, _ = MODELS[name]
    with pytest.raises(DataError, match=r"got 'df\.zarr'; .* kme_dist\.open_dataset\('df\.zarr'\)"):
        make().fit("df.zarr")


def test_an_estimator_of_rows_in_memory_says_how_to_read_a_data_set(tmp_path):
    data = kme.ingest((X, Y), tmp_path / "rows.zarr", label="y")
    with pytest.raises(DataError, match=r"ParzenClassifier is fitted to rows in memory.*dataset\.read\(\)"):
        kme.ParzenClassifier().fit(data)


def test_texts_need_a_kernel_of_texts():
    texts, codes = ["abab", "abba", "xyxy", "yxxy"], [0, 0, 1, 1]
    spectrum = kme.kernels.Spectrum(p=2)
    refused = [
        lambda: kme.KernelMean("kme").fit(texts),
        lambda: kme.KernelMean("kme", KERNEL).fit(texts),
        lambda: kme.ConditionalMeanEmbedding().fit(texts, codes),
        lambda: kme.mmd_test(texts, texts),
        lambda: kme.SupportMeasureClassifier().fit([texts] * 4, codes),
    ]
    for call in refused:
        with pytest.raises(DataError, match=r"rows are texts, e\.g\. 'abab', and Gaussian .*Spectrum\(p=2\)"):
            call()
    kme.KernelMean("kme", spectrum).fit(texts)
    kme.ConditionalMeanEmbedding(spectrum, regularization=0.1).fit(texts, codes)
    with pytest.raises(DataError, match="MixtureMatching takes rows of numbers"):
        kme.MixtureMatching().fit(texts)
    for model in (kme.MCEClassifier(), kme.ParzenClassifier(kernel=spectrum), kme.CENClassifier()):
        for given in (texts, np.array(texts), np.array(texts)[:, None]):
            with pytest.raises(DataError, match=r"takes rows of numbers, got the text 'abab' in row 0; .*KernelMean"):
                model.fit(given, codes)


def test_a_text_in_a_table_is_named_by_row_and_column():
    mixed = FRAME.astype(object)
    mixed.loc[4, "age"] = "old"
    with pytest.raises(DataError, match=r"column 'age' mixes types of values, .*'old' \(str\) in row 4"):
        kme.MCEClassifier().fit(mixed, Y)
    with pytest.raises(DataError, match="the text 'old' in row 4, column 2"):
        kme.ParzenClassifier().fit(X, Y).predict(mixed.to_numpy())


def test_the_only_class_is_shown_as_a_plain_value():
    with pytest.raises(DataError, match=r"only one class \(0\.0\)"):
        kme.MCEClassifier().fit(X, np.zeros(len(X)))
    with pytest.raises(DataError, match=r"only one class \('a'\)"):
        kme.ParzenClassifier().fit(X, ["a"] * len(X))


@pytest.mark.parametrize("largest", [2**53 + 1, -(2**53) - 1])
def test_integers_without_a_number_of_their_own_are_refused_by_column(largest):
    rows = np.array([[1, 2], [3, largest]])
    with pytest.raises(DataError, match=rf"column 1 has the integer {largest}, and beyond 2\*\*53"):
        check_columns(rows)
    with pytest.raises(DataError, match="column 'b' has the integer"):
        check_columns(pd.DataFrame(rows, columns=["a", "b"]))
    check_columns(np.array([[2**53, -(2**53)]]))
    check_columns(np.zeros((0, 2), np.int64))


def test_column_names_that_repeat_are_refused():
    with pytest.raises(DataError, match="the column name 'a' occurs 2 times"):
        kme.MCEClassifier(steps=2).fit(pd.DataFrame(X[:, :2], columns=["a", "a"]), Y)


def test_integer_targets_without_a_number_of_their_own_are_refused():
    with pytest.raises(DataError, match=rf"the targets: found the integer {2**60 + 49}, and beyond 2\*\*53"):
        kme.CMERegressor().fit(np.random.default_rng(0).normal(size=(50, 2)), 2**60 + np.arange(50))
