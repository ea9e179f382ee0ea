"""Figures of Muandet, Sriperumbudur, Fukumizu, Gretton and Schölkopf, Kernel Mean Shrinkage Estimators.

Section 6.1: loss |μ - μ_P|² of the estimators on mixtures of four Gaussians, known in closed form. Table 1: error of
the Parzen-window classifier over 100 splits with 30 % held out, features standardised, width from a uniform grid over
[0.1, 2], all choices made inside the training part. Table 2: negative log-likelihood of mixtures of ten Gaussians,
fitted by kernel mean matching. Table 3: support measure machines; the paper's data are not at hand, others stand in.
"""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from kme_dist import MixtureMatching, OneClassSupportMeasure, ParzenClassifier, SupportMeasureClassifier, backend
from kme_dist.core.density import Gaussians, inner_products
from kme_dist.core.kernels.base import median_length_scale
from kme_dist.core.means import ESTIMATORS, gram_weights
from kme_dist.kernels import Gaussian, Linear, Polynomial

pytestmark = [pytest.mark.paper, pytest.mark.timeout(4 * 3600)]

# Published error and deviation: KME, B-KMSE, R-KMSE, S-KMSE.
PARZEN = {
    "ionosphere": ((0.2873, 0.0343), (0.2768, 0.0359), (0.2749, 0.0341), (0.2800, 0.0367)),
    "parkinsons": ((0.1318, 0.0441), (0.1250, 0.0366), (0.1157, 0.0395), (0.1309, 0.0396)),
    "pima": ((0.2951, 0.0462), (0.2921, 0.0442), (0.2937, 0.0458), (0.2943, 0.0471)),
    "iris": ((0.1079, 0.0379), (0.1071, 0.0389), (0.1055, 0.0389), (0.1040, 0.0383)),
    "wine": ((0.1301, 0.0381), (0.1183, 0.0445), (0.1161, 0.0414), (0.1183, 0.0431)),
}
SPLITS = 100

# Published negative log-likelihood: KME, B-KMSE, R-KMSE, S-KMSE. The copy at hand lacks one of the blocks after these
# two and does not tell which, so the Gaussian kernel has nothing to be compared with.
DENSITY = {
    "ionosphere": {"linear": (39.878, 40.038, 39.859, 39.823), "poly2": (34.651, 34.352, 34.390, 34.009)},
    "wine": {"linear": (16.019, 16.000, 16.039, 16.009), "poly2": (17.070, 16.920, 16.886, 16.960)},
    "satimage": {"linear": (25.258, 25.317, 25.219, 25.186), "poly2": (24.214, 24.111, 24.132, 24.259)},
    "segment": {"linear": (18.326, 17.868, 18.055, 18.124), "poly2": (18.571, 18.292, 18.277, 18.631)},
    "abalone": {"linear": (5.706, 5.665, 5.708, 5.722), "poly2": (7.281, 7.116, 7.185, 7.025)},
}
# Where the claim of the paper does not hold: `test_a_shrunk_mean_makes_the_mixture_of_a_polynomial_kernel_narrower`.
NARROWER = {("ionosphere", "poly2"): ("b-kmse", "r-kmse")}
RANDOMISATIONS = 30
MOST_ROWS = 1_000  # of a data set in one randomisation

# Published: SMM accuracy on scene images and OCSMM AUC on particle physics, kernel between means linear, then not.
MEASURES = {"smm": ((0.5432, 0.5455, 0.5521, 0.5606), (0.6017, 0.6106, 0.6303, 0.6412)),
            "ocsmm": ((0.6955, 0.6964, 0.6970, 0.6970), (0.9085, 0.9088, 0.9105, 0.9063))}  # fmt: skip
BAG_ROWS, BAGS, REPEATS = 4, 20, 10  # rows of a bag, bags of a class for training and for testing


def not_worse(differences, held_out=0.3):
    """Whether the mean of loss minus loss of the plain mean is within noise of 0, or below it."""
    # Splits share their rows, so their spread understates the noise: corrected as by Nadeau and Bengio.
    noise = differences.std(ddof=1) * np.sqrt(1 / len(differences) + held_out / (1 - held_out))
    return differences.mean() < 2 * noise + 1e-12


def random_mixture(rng, d=30):
    """The mixture of section 6.1.2, whose text it agrees with.

    Exactly what is used: d = 30; four Gaussians with shares 0.05, 0.3, 0.4, 0.25; each coordinate of each mean uniform
    on [-10, 10]; each covariance Wishart with scale matrix 2I and 7 degrees of freedom (so of rank 7), plus 0.2 I,
    which is independent noise of variance 0.2. Samples have n = 10 rows; the kernel is Gaussian, the median distance
    of the sample its length scale; 30 distributions, 30 samples of each. No printed number is compared with; what is
    asserted is the message of the section: every shrinkage estimator has less risk than the plain mean.
    """
    shares = np.array([0.05, 0.3, 0.4, 0.25])
    means = rng.uniform(-10, 10, size=(4, d))
    roots = rng.normal(0, np.sqrt(2), size=(4, 7, d))
    covariances = np.einsum("kia,kib->kab", roots, roots) + 0.2 * np.eye(d)
    return shares, Gaussians(means, covariances)


def draw(shares, mixture, n, rng):
    parts = rng.choice(len(shares), size=n, p=shares)
    return np.stack([rng.multivariate_normal(mixture.means[k], mixture.covariances[k]) for k in parts])


def mean_losses(distributions=30, repeats=30, n=10):
    rng = np.random.default_rng(0)
    losses = np.zeros((distributions, len(ESTIMATORS)))
    for i in range(distributions):
        shares, mixture = random_mixture(rng)
        for _ in range(repeats):
            X = draw(shares, mixture, n, rng)
            kernel = Gaussian(length_scale=median_length_scale(X, 0))
            K = kernel.gram(X)
            at_rows = inner_products(kernel, Gaussians.points(X), mixture) @ shares
            norm = shares @ inner_products(kernel, mixture, mixture) @ shares
            for j, estimator in enumerate(ESTIMATORS):
                weights = gram_weights(estimator, K).weights
                losses[i, j] += (weights @ K @ weights - 2 * weights @ at_rows + norm) / repeats
    return losses


def test_every_shrinkage_estimator_has_less_risk_than_the_plain_mean():
    losses = mean_losses()
    plain = losses[:, 0]
    for j, estimator in enumerate(ESTIMATORS[1:], start=1):
        gain = 100 * (plain - losses[:, j]) / plain
        print(
            f"{estimator}: loss {gain.mean():.1f} % below that of the plain mean on average over {len(gain)} "
            f"distributions, from {gain.min():.1f} % to {gain.max():.1f} %"
        )
        assert losses[:, j].mean() < plain.mean()


def parzen_errors(X, y, splits=SPLITS):
    errors = np.zeros((splits, len(ESTIMATORS)))
    with backend.blas_threads(1):
        for i in range(splits):
            train, test = train_test_split(np.arange(len(y)), test_size=0.3, random_state=i)
            for j, estimator in enumerate(ESTIMATORS):
                clf = ParzenClassifier(estimator, length_scales=np.linspace(0.1, 2.0, 20), random_state=i)
                errors[i, j] = 1 - clf.fit(X[train], y[train]).score(X[test], y[test])
    return errors


@pytest.mark.shared_data
@pytest.mark.parametrize("name", PARZEN)
def test_parzen_errors_are_within_one_published_deviation(name, shared_data):
    errors = parzen_errors(*shared_data(name))
    for j, (estimator, (published, deviation)) in enumerate(zip(ESTIMATORS, PARZEN[name], strict=True)):
        found = errors[:, j].mean()
        print(f"{name} {estimator}: {found:.4f} ± {errors[:, j].std():.4f}, published {published:.4f} ± {deviation}")
        assert found < published + deviation
        if name != "wine":  # where every estimator is far better than printed, for reasons the paper does not tell
            assert found > published - deviation
    assert not_worse(errors[:, 2] - errors[:, 0])


def density_split(X, i):
    """Training and test rows of randomisation i, standardised by the training part."""
    rows = np.random.default_rng(i).permutation(len(X))[:MOST_ROWS]
    train, test = (X[part].astype(np.float64) for part in train_test_split(rows, test_size=0.3, random_state=i))
    varies = train.std(axis=0) > 0
    shift, width = train.mean(axis=0)[varies], train.std(axis=0)[varies]
    return (train[:, varies] - shift) / width, (test[:, varies] - shift) / width


def density_losses(X, kernel_name):
    """Negative log-likelihood of held-out rows (randomisations, estimators); ours takes one set of k-means clusters
    for a start (the paper 50), at most MOST_ROWS rows, and features standardised by the training part. So the mean of a
    linear kernel is 0, nothing is left to shrink, and all estimators agree: there the figures only show the start."""
    losses = np.zeros((RANDOMISATIONS, len(ESTIMATORS)))
    for i in range(RANDOMISATIONS):
        train, test = density_split(X, i)
        kernel = {"linear": Linear(), "poly2": Polynomial(degree=2), "rbf": "gaussian"}[kernel_name]
        for j, estimator in enumerate(ESTIMATORS):
            fit = MixtureMatching(10, kernel, estimator, starts=1, random_state=i).fit(train)
            losses[i, j] = -fit.score(test)
    return losses


@pytest.mark.shared_data
@pytest.mark.parametrize("kernel_name", ["linear", "poly2", "rbf"])
@pytest.mark.parametrize("name", DENSITY)
def test_matching_a_shrunk_mean_fits_densities_no_worse(name, kernel_name, shared_data):
    losses = density_losses(shared_data(name)[0], kernel_name)
    published = DENSITY[name].get(kernel_name, ("-",) * 4)
    for j, estimator in enumerate(ESTIMATORS):
        mean, spread = losses[:, j].mean(), losses[:, j].std()
        print(f"{name} {kernel_name} {estimator}: {mean:.3f} ± {spread:.3f}, published {published[j]}")
    assert np.isfinite(losses).all()
    for j, estimator in enumerate(ESTIMATORS[1:], start=1):
        difference = losses[:, j] - losses[:, 0]
        if estimator in NARROWER.get((name, kernel_name), ()):
            assert difference.mean() > 0, estimator
            assert np.mean(difference > 0) > 0.5, estimator
        else:
            assert not_worse(difference), estimator


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["ionosphere", "wine"])
def test_a_shrunk_mean_makes_the_mixture_of_a_polynomial_kernel_narrower(name, shared_data):
    """Why B-KMSE and R-KMSE are worse than the plain mean on ionosphere with the polynomial kernel of degree 2.

    The paper prints 34.65, 34.35, 34.39 and 34.01 (KME, B, R, S); here they are 42.98, 43.83, 43.85 and 43.05. An
    implementation in plain NumPy that shares no code gives 43.05, 43.84 and 43.89 (KME, B, R; B is worse in all 30
    randomisations), so it is not the code. The kernel depends on a distribution by its first two moments only, and the
    shares of a mixture add up to one. The mixture nearest to (1 - α) μ̂ therefore has 1 - α times the second moments of
    the training rows (asserted below; α is 0.057 for ionosphere, 0.045 for wine): it is narrower. Ten Gaussians matched
    to 245 rows are too narrow for new rows already, so a larger α is worse and a negative one better: -0.8 at α = -0.1,
    +1.4 at 0.1, +3.5 at 0.2. The rule for α minimises the risk of the kernel mean, not of the likelihood.

    Readings of what the paper leaves open do not change the sign for ionosphere (B minus KME): one variance for all
    directions +0.09, offset 0 in the kernel +0.30, features in [0, 1] +0.04 (α is 0.002 there), unscaled features with
    one variance +0.12. On wine B is +0.14 worse, within the noise of its splits. One start was used throughout. The
    k-means clusters before matching have 33.4 on ionosphere and 15.0 on wine, near the printed 34.65 and 17.07, so the
    optimiser of the paper may have stayed near its start; its text does not tell.
    """
    train, _ = density_split(shared_data(name)[0], 0)
    second = (train**2).mean(axis=0).sum()
    alpha = 1 - gram_weights("b-kmse", Polynomial(degree=2).gram(train)).weights.sum()
    assert 0.03 < alpha < 0.08
    for estimator, expected in (("kme", 1.0), ("b-kmse", 1 - alpha)):
        fit = MixtureMatching(10, Polynomial(degree=2), estimator, starts=1, random_state=0).fit(train)
        moments = fit.shares_ @ (fit.variances_ + fit.means_**2)
        assert moments.sum() / second == pytest.approx(expected, rel=5e-3)


def bags_of(X, y, classes, rng):
    """BAGS bags of each class for training and as many for testing, no row in two of them."""
    parts = ([], [])
    for c in classes:
        rows = rng.permutation(np.flatnonzero(y == c))[: 2 * BAGS * BAG_ROWS].reshape(2, BAGS, BAG_ROWS)
        for part, chosen in zip(parts, rows, strict=True):
            part += [(X[bag], c) for bag in chosen]
    return parts


@pytest.mark.shared_data
@pytest.mark.parametrize("level", ["linear", "gaussian"])
def test_support_measure_machines_on_shrunk_means_are_no_worse(level, shared_data):
    """Bags of four pixels' spectra of one kind of ground (satimage); scene images and particles are not at hand, so the
    published figures are printed for orientation only. C = 10, nu = 0.1, widths are median distances."""
    X, y = shared_data("satimage")
    X = ((X - X.mean(axis=0)) / X.std(axis=0)).astype(np.float64)
    classes = np.unique(y)
    found = {name: np.zeros((REPEATS, len(ESTIMATORS))) for name in MEASURES}
    with backend.blas_threads(1):
        for i in range(REPEATS):
            rng = np.random.default_rng(i)
            train, test = bags_of(X, y, classes, rng)
            usual = classes[i % len(classes)]
            for j, estimator in enumerate(ESTIMATORS):
                clf = SupportMeasureClassifier(estimator=estimator, level=level, C=10.0)
                clf.fit([bag for bag, _ in train], [c for _, c in train])
                found["smm"][i, j] = clf.score([bag for bag, _ in test], [c for _, c in test])
                one = OneClassSupportMeasure(estimator=estimator, level=level)
                one.fit([bag for bag, c in train if c == usual])
                values = one.decision_function([bag for bag, _ in test])
                found["ocsmm"][i, j] = roc_auc_score([c == usual for _, c in test], values)
    for name, values in found.items():
        for j, estimator in enumerate(ESTIMATORS):
            published = MEASURES[name][level != "linear"][j]
            print(f"{name} {level} {estimator}: {values[:, j].mean():.4f}, published on other data {published}")
            assert not_worse(values[:, 0] - values[:, j], held_out=0.5), (name, estimator)
