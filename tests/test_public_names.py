"""The shop window: every public name exists, is listed once, and is documented."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import kme_dist
from kme_dist import kernels


@pytest.mark.parametrize("module", [kme_dist, kernels], ids=lambda module: module.__name__)
def test_all_is_sorted_complete_and_true(module):
    assert list(module.__all__) == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("module", [kme_dist, kernels], ids=lambda module: module.__name__)
def test_public_names_are_documented(module):
    objects = {name: getattr(module, name) for name in module.__all__}
    assert not [name for name, found in objects.items() if not inspect.getdoc(found)]


def test_interface_that_others_rely_on():
    for name in ("MCEClassifier", "load", "kernels", "errors", "rcb_objective", "open_dataset"):
        assert hasattr(kme_dist, name), name
    for name in ("KernelMean", "ParzenClassifier", "SupportMeasureClassifier", "ConditionalMeanEmbedding", "mmd_test"):
        assert hasattr(kme_dist, name), name
    for name in ("CENClassifier", "ASKLClassifier", "ASKLRegressor"):
        assert name in kme_dist.__all__
    for name in ("Gaussian", "Laplace", "Matern", "RationalQuadratic", "Periodic", "Linear", "Polynomial", "Cosine"):
        assert name in kernels.__all__
    arguments = inspect.signature(kme_dist.rcb_objective).parameters
    assert list(arguments)[:3] == ["kernel", "X", "y"]
    assert {"regularization", "n_classes", "risk", "complexity_weight", "loss_floor"} <= set(arguments)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(arguments.values())[3:])


MODULES = ["kme_dist"] + [
    found.name
    for found in pkgutil.walk_packages(kme_dist.__path__, "kme_dist.")
    if not found.name.endswith("__main__") and ".pipelines" not in found.name
]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_a_guide_and_true_examples(name):
    if name == "kme_dist.run.torch_features":
        pytest.importorskip("torch")  # an extra
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    assert doctest.testmod(module).failed == 0


def test_unknown_names_are_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="no attribute 'MCEClasifier'"):
        kme_dist.MCEClasifier  # noqa: B018
