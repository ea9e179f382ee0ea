"""MNIST in Hsu, Nock and Ramos, figure 2: accuracy against the number of images, length scales of pixels, networks.

The first n training images; accuracy on the 10 000 test images. RCB and ERM: an ARD Gaussian of 784 length scales, all
parameters from 1 as published, full gradients up to `batch` rows. GP is scikit-learn's Gaussian process classifier with
an isotropic Gaussian, SVC its support vector classifier with default settings. Length scales of pixels are learned for
groups of digits in batches of 1200 by RCB. The networks are two convolutions and 1024 features, with an embedding
(CEN) or a softmax layer (CNN), from the same start, in the same batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.svm import SVC

from kme_dist import CENClassifier, MCEClassifier, kernels
from kme_dist.data.plan import BatchPlan

if TYPE_CHECKING:
    from kme_dist.pipelines.reproduce.folds import Fold

TRAINING_IMAGES = 60_000
BATCH, RATE = 6000, 0.003  # of the networks


def figure_2(fold: Fold, X: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Accuracy on test images, in per cent; of pixels, on the test images of their digits."""
    known, new = images(X, y)
    what, _, which = fold.row.partition(" ")
    if what == "pixels":
        return _pixels([int(digit) for digit in which.split(", ")], known, new, fold.settings)
    if what == "network":
        return _network(fold.method, known, new, fold.settings)
    model = _classifier(fold.method, int(what), fold.settings)
    return {"value": accuracy(model.fit(known[0][: int(what)], known[1][: int(what)]), *new)}


def images(X: np.ndarray, y: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and test images, pixels between 0 and 1, each with its labels."""
    pixels = X.astype(np.float32) / 255
    return (pixels[:TRAINING_IMAGES], y[:TRAINING_IMAGES]), (pixels[TRAINING_IMAGES:], y[TRAINING_IMAGES:])


def accuracy(model: Any, X: np.ndarray, y: np.ndarray) -> float:
    return 100 * float(np.mean(np.concatenate([model.predict(part) for part in np.array_split(X, 20)]) == y))


def _classifier(method: str, rows: int, settings: dict[str, Any]) -> Any:
    if method == "GP":
        return GaussianProcessClassifier(RBF(10.0), random_state=0)
    if method == "SVC":
        return SVC()
    return MCEClassifier(
        kernels.Gaussian(length_scale=np.ones(784)),
        "rcb" if method == "RCB" else "erm",
        steps=int(settings["steps"]),
        batch_size=min(rows, int(settings["batch"])),
        scaling=None,
        refit_regularization=False,
    )


def _pixels(digits: list[int], known: Any, new: Any, settings: dict[str, Any]) -> dict[str, Any]:
    (X, y), (Xq, yq) = (
        (rows[np.isin(labels, digits)], labels[np.isin(labels, digits)]) for rows, labels in (known, new)
    )
    model = MCEClassifier(
        objective="rcb",
        refit_regularization=False,
        steps=int(settings["pixel_steps"]),
        batch_size=1200,
        scaling=None,
        solver="nystrom",
        centres=200,
    )
    model.fit(X, y)
    scales = np.where(X.max(axis=0) > 0, model.kernel_.length_scale, np.nan)  # nothing is learned of the others
    shown = [None if np.isnan(scale) else round(float(scale), 4) for scale in scales]
    return {"value": accuracy(model, Xq, yq), "length_scales": shown}


def _network(method: str, known: Any, new: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Both heads on one network; settings as in benchmarks/mnist.py, which also measures the curves."""
    module, steps = he_network(0), int(settings["epochs"]) * (TRAINING_IMAGES // BATCH)
    if method == "CNN":
        return {"value": _softmax_accuracy(module, known, new, steps)}
    model = CENClassifier(
        network=module,
        complexity_weight=0.0,
        regularization=0.1,
        objective="validation",
        loss="softmax",
        average=0.98,
        dropout=0.5,
        independent_masks=True,
        risk="mean",
        refit_regularization=True,
        batch_size=BATCH,
        steps=steps,
        learning_rate=RATE,
        schedule="cosine",
        scaling=None,
    )
    return {"value": accuracy(model.fit(*known), *new)}


def he_network(seed: int) -> Any:
    """Two 5 x 5 convolutions and 1024 features from He's start; the published start needs longer runs than these."""
    import torch

    from kme_dist.run.torch_features import hnr_cnn

    module = hnr_cnn(28)
    torch.manual_seed(seed)
    for layer in module.children():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            torch.nn.init.zeros_(layer.bias)
    return module


def _softmax_accuracy(module: Any, known: Any, new: Any, steps: int) -> float:
    """Of the network with a softmax layer: dropout 0.5, Adam with cosine decay, batches as for the embedding."""
    import torch

    torch.set_num_threads(1)
    (X, y), (Xq, yq) = known, new
    whole = torch.nn.Sequential(module, torch.nn.Dropout(0.5), torch.nn.Linear(1024, 10))
    optimizer = torch.optim.Adam(whole.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(0)
    plan = BatchPlan(((0, len(y)),), BATCH, 0, "rows")
    for step in range(steps):
        rows = plan.batch(step).rows
        loss = torch.nn.functional.cross_entropy(whole(torch.from_numpy(X[rows])), torch.from_numpy(y[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    whole.eval()
    with torch.no_grad():
        decided = torch.cat([whole(torch.from_numpy(part)).argmax(1) for part in np.array_split(Xq, 20)])
    return 100 * float((decided.numpy() == yq).mean())
