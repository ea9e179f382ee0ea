"""Table 2 of Li, Liu and Wang: accuracy and RMSE of automated spectral kernel learning, two splits, 500 frequencies.

The protocol is `kme_dist.pipelines.reproduce.askl`, the published figures are in configs/paper/askl-table-2.yaml.
"""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist import backend
from kme_dist.pipelines.reproduce import askl
from kme_dist.pipelines.reproduce.folds import Fold
from kme_dist.pipelines.reproduce.published import read_table

pytestmark = [pytest.mark.paper, pytest.mark.shared_data, pytest.mark.timeout(4 * 3600)]

SPLITS = 2


@pytest.mark.parametrize("name", ["segment", "satimage", "pendigits", "abalone", "space_ga", "cadata"])
def test_spectral_kernels_pass_the_published_figure(name, shared_data):
    X, y = shared_data(name)
    published, found = read_table("askl-table-2").rows[name], {}
    for method in reversed(published):
        folds = [Fold("askl-table-2", name, method, k, settings={"frequencies": 500}) for k in range(SPLITS)]
        with backend.blas_threads(1):
            scores = [askl.table_2(fold, X, y)["value"] for fold in folds]
        found[method] = float(np.mean(scores))
        print(f"{name} {method}: {found[method]:.2f} +- {np.std(scores):.2f}", flush=True)
    if name not in askl.REGRESSION:
        assert found["ASKL"] >= published["ASKL"][0]
    else:
        assert found["ASKL"] <= published["ASKL"][0]
        # Two of the printed figures are above what a constant reaches; half the variance is a bar that says something.
        assert found["ASKL"] < np.sqrt(0.5) * 100 * y.std() / np.ptp(y)
