"""Table 1 of Hsu, Nock and Ramos: accuracy of the Gaussian MCE on UCI data, mean and deviation over ten folds.

The protocols and what is known of them are in `kme_dist.pipelines.reproduce.hnr`, the published figures in
configs/paper/hnr-table-1.yaml; `kme-dist reproduce hnr-table-1` shows all cells.
"""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.model_selection import KFold

from kme_dist import backend
from kme_dist.pipelines.reproduce import hnr
from kme_dist.pipelines.reproduce.folds import Fold
from kme_dist.pipelines.reproduce.published import read_table

pytestmark = [pytest.mark.paper, pytest.mark.shared_data, pytest.mark.timeout(4 * 3600)]


def ten_folds(method, name, shared_data):
    X, y = shared_data(name)
    with backend.blas_threads(1):
        found = [hnr.table_1(Fold("hnr-table-1", name, method, k), X, y)["value"] for k in range(hnr.FOLDS)]
    return np.mean(found), np.std(found)


def as_printed(method, name):
    mean, deviation = read_table("hnr-table-1").rows[name][method]
    return pytest.approx(mean, abs=0.051), pytest.approx(deviation, abs=0.051)


@pytest.mark.parametrize("name", ["wine", "ecoli"])
def test_full_gradient_gives_the_published_figure(name, shared_data):
    assert ten_folds("GMCE", name, shared_data) == as_printed("GMCE", name)


@pytest.mark.parametrize("name", ["wine", "ecoli"])
def test_stochastic_gradient_gives_the_published_figure(name, shared_data):
    assert ten_folds("GMCE-SGD", name, shared_data) == as_printed("GMCE-SGD", name)


@pytest.mark.parametrize("name", ["banknote", "segment"])
def test_stochastic_gradient_comes_within_half_a_point(name, shared_data):
    found, _ = ten_folds("GMCE-SGD", name, shared_data)
    assert found == pytest.approx(read_table("hnr-table-1").rows[name]["GMCE-SGD"][0], abs=0.5)


@pytest.mark.parametrize("name", ["wine", "ecoli"])
def test_the_estimators_own_batches_stay_within_half_a_deviation(name, shared_data):
    mean, deviation = read_table("hnr-table-1").rows[name]["GMCE-SGD"]
    found, _ = ten_folds("GMCE-SGD own order", name, shared_data)
    assert abs(found - mean) < deviation / 2


# --- other ways to choose the parameters -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["wine", "banknote"])
def test_median_distances_give_the_published_figure(name, shared_data):
    assert ten_folds("MED", name, shared_data) == as_printed("MED", name)


def test_a_median_of_zero_gives_the_first_class_and_the_published_figure(shared_data):
    """Two features of ecoli have one value in nearly all rows. Divided by zero, no decision is a number."""
    X = hnr.unit_range(shared_data("ecoli")[0])
    assert all((hnr.median_distances(X[train]) == 0).any() for train, _ in KFold(10).split(X))
    assert ten_folds("MED", "ecoli", shared_data) == as_printed("MED", "ecoli")


# The grid of CV is not printed; why ERM differs by a few rows was not found. On the same folds near, not to the digit
# (ERM 92.8 ± 6.6, 76.6 ± 18.5; CV 95.0 ± 5.8, 78.1 ± 20.7).
@pytest.mark.parametrize("method", ["ERM", "CV"])
@pytest.mark.parametrize("name", ["wine", "ecoli"])
def test_other_objectives_stay_within_a_third_of_the_published_deviation(name, method, shared_data):
    mean, deviation = read_table("hnr-table-1").rows[name][method]
    found, spread = ten_folds(method, name, shared_data)
    print(f"{name} {method}: {found:.1f} ± {spread:.1f}, published {mean} ± {deviation}")
    assert abs(found - mean) < deviation / 3
    assert abs(spread - deviation) < deviation / 3


# --- networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["CEN-1", "CEN-2"])
@pytest.mark.parametrize("name", ["wine", "ecoli", "banknote", "segment"])
def test_networks_reach_the_published_accuracy(name, network, shared_data):
    published, spread = read_table("hnr-table-1").rows[name][network]
    mean, deviation = ten_folds(network, name, shared_data)
    print(f"{name} {network}: {mean:.1f} +- {deviation:.1f} (published {published} +- {spread})", flush=True)
    assert mean >= published - spread
