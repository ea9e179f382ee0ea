"""MNIST: an ARD Gaussian embedding on few images, and a convolutional network with either head.

    python -m benchmarks.mnist ard [--rows 5000]         kernel learned on the first images, test accuracy
    python -m benchmarks.mnist pixels --out FOLDER        length scales of pixels for groups of digits, as a picture
    python -m benchmarks.mnist cen --out FOLDER           the convolutional embedding network
    python -m benchmarks.mnist softmax --out FOLDER       the same network with a softmax layer, from the same start
    python -m benchmarks.mnist compare --out FOLDER       both curves side by side, and a picture of them

Both networks have two 5 x 5 convolutions and 1024 features, dropout 0.5 on the features, the same start (He's, or the
published one by `--start published`), the same batches in the same order, the same rate, Adam with cosine decay. The
embedding network is evaluated with W fitted to all 60 000 training images, the softmax network as it is.

`cen` learns by validation within the batch and a softmax loss; `cen --published` by the published objective and
settings. Loss, halves, dropout, rate and regularisation of the former were chosen on the last 10 000 training images,
the batch size is the published one, averaging was added after looking at test curves; test results also influenced the
settings of the latter. Every epoch adds a line to FOLDER/NAME.json, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

import kme_dist as kme
from benchmarks.machine import load_average, shared_data
from kme_dist.data.plan import BatchPlan
from kme_dist.pipelines.reproduce.mnist import he_network

GROUPS = ((0, 1), (3, 8), (4, 9), (1, 7), (2, 5), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9))


def images():
    with np.load(shared_data() / "mnist.npz", allow_pickle=False) as stored:
        X, y = stored["X"].astype(np.float32) / 255, stored["y"]
    return X[:60_000], y[:60_000], X[60_000:], y[60_000:]


def network(start, seed):
    """Two 5 x 5 convolutions and 1024 features; the published initialisation needs longer runs than these."""
    from kme_dist.run.torch_features import hnr_cnn, published_start

    return published_start(hnr_cnn(28), seed) if start == "published" else he_network(seed)


class Log:
    """A curve that is written to disk after every point."""

    def __init__(self, folder, name, settings):
        self.path = Path(folder) / f"{name}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.record = {"name": name, "settings": settings, "points": []}
        self.began, self.processor = time.perf_counter(), time.process_time()

    def add(self, epoch, accuracy):
        minutes, processor = (time.perf_counter() - self.began) / 60, (time.process_time() - self.processor) / 60
        point = {"epoch": epoch, "accuracy": accuracy, "minutes": minutes, "processor_minutes": processor}
        self.record["points"].append(point)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.record, indent=1), encoding="utf-8")
        os.replace(partial, self.path)
        print(
            f"{self.record['name']}: epoch {epoch}, test accuracy {100 * accuracy:.2f} %, {minutes:.1f} minutes "
            f"({processor:.1f} of processor time; machine load {load_average()})",
            flush=True,
        )


def ard(arguments):
    X, y, Xq, yq = images()
    began = time.perf_counter()
    model = kme.MCEClassifier(
        objective=arguments.objective, steps=arguments.steps, batch_size=arguments.batch, scaling=None
    )
    model.fit(X[: arguments.rows], y[: arguments.rows])
    accuracy = float(np.mean(np.concatenate([model.predict(part) for part in np.array_split(Xq, 20)]) == yq))
    print(
        f"ARD Gaussian, {arguments.rows} images, {arguments.steps} steps of {arguments.batch} rows, objective kept "
        f"{model.objective_}: {100 * accuracy:.2f} % on {len(yq)} test images, "
        f"{(time.perf_counter() - began) / 60:.1f} minutes, machine load {load_average()}"
    )


def pixels(arguments):
    from kme_dist.report import plots as feature_plots

    X, y, _, _ = images()
    maps = {}
    for group in GROUPS:
        chosen = np.isin(y, group)
        model = kme.MCEClassifier(
            objective="rcb",
            refit_regularization=False,
            steps=arguments.steps,
            batch_size=1200,
            scaling=None,
            solver="nystrom",
            centres=200,
        )
        model.fit(X[chosen], y[chosen])
        title = "all ten digits" if len(group) == 10 else " and ".join(map(str, group))
        varies = X[chosen].max(axis=0) > 0  # nothing is learned of the others
        scales = np.where(varies, model.kernel_.length_scale, np.nan)
        maps[title] = scales.reshape(28, 28)
        print(f"{title}: {chosen.sum()} images, length scales {np.nanmin(scales):.2f} to {np.nanmax(scales):.2f}")
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    feature_plots.pixel_length_scales(maps).savefig(Path(arguments.out) / "pixels.png", dpi=120)


def cen(arguments):
    X, y, Xq, yq = images()
    per_epoch = len(y) // arguments.batch
    way = (
        {"complexity_weight": 0.1, "regularization": 2.0}
        if arguments.published
        else {
            "complexity_weight": 0.0,
            "regularization": 0.1,
            "objective": "validation",
            "loss": "softmax",
            "average": 0.98,
        }
    )
    options = {
        **way,
        "dropout": 0.5,
        "independent_masks": True,
        "risk": "mean",
        "refit_regularization": True,
        "batch_size": arguments.batch,
        "steps": per_epoch * arguments.epochs,
        "learning_rate": arguments.rate,
        "schedule": "cosine",
        "scaling": None,
        "random_state": arguments.seed,
    }
    model = kme.CENClassifier(network=network(arguments.start, arguments.seed), **options)
    log = Log(arguments.out, "cen", {**options, "epochs": arguments.epochs, "start": arguments.start})

    def report(record):
        if record["step"] % 20 == 0:
            print(f"  step {record['step']}/{record['steps']} q {record['objective']:.4f}", flush=True)
        if "watched_accuracy" in record:
            log.add(len(log.record["points"]) + 1, record["watched_accuracy"])
            model.save(Path(arguments.out) / "cen.zarr")

    model.fit(X, y, callback=report, watch=(Xq, yq))


def softmax(arguments):
    import torch

    from kme_dist.run.torch_features import published_start

    torch.set_num_threads(1)
    X, y, Xq, yq = images()
    head = torch.nn.Linear(1024, 10)
    if arguments.start == "published":
        head = published_start(head, arguments.seed + 1)
    whole = torch.nn.Sequential(network(arguments.start, arguments.seed), torch.nn.Dropout(0.5), head)
    optimizer = torch.optim.Adam(whole.parameters(), lr=arguments.rate)
    per_epoch = len(y) // arguments.batch
    steps = per_epoch * arguments.epochs
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    log = Log(arguments.out, arguments.name, {k: v for k, v in vars(arguments).items() if k != "run"})
    torch.manual_seed(arguments.seed)
    plan = BatchPlan(((0, len(y)),), arguments.batch, arguments.seed, "rows")
    for step in range(steps):
        rows = plan.batch(step).rows
        whole.train()
        loss = torch.nn.functional.cross_entropy(whole(torch.from_numpy(X[rows])), torch.from_numpy(y[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 20 == 0:
            print(f"  step {step + 1}/{steps} loss {float(loss):.4f}", flush=True)
        if (step + 1) % per_epoch == 0:
            whole.eval()
            with torch.no_grad():
                decided = torch.cat([whole(torch.from_numpy(part)).argmax(1) for part in np.array_split(Xq, 20)])
            log.add((step + 1) // per_epoch, float((decided.numpy() == yq).mean()))


def compare(arguments):
    from kme_dist.report import plots as feature_plots

    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(arguments.out).glob("*.json"))]
    curves = {entry["name"]: [(p["epoch"], p["accuracy"]) for p in entry["points"]] for entry in found}
    for entry in found:
        shown = ", ".join(f"{100 * p['accuracy']:.2f}" for p in entry["points"])
        last = entry["points"][-1]
        print(f"{entry['name']}: {shown} % ({last['processor_minutes']:.1f} minutes of processor time)")
    ours = dict(curves["cen"])
    for name, points in curves.items():
        shared = [(epoch, value) for epoch, value in points if epoch in ours and name != "cen"]
        if shared:
            ahead = sum(ours[epoch] > value for epoch, value in shared)
            print(f"the embedding network is ahead of {name} in {ahead} of {len(shared)} epochs")
    feature_plots.accuracy_curves(curves).savefig(Path(arguments.out) / "curves.png", dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("ard")
    one.add_argument("--rows", type=int, default=5000)
    one.add_argument("--steps", type=int, default=100)
    one.add_argument("--batch", type=int, default=1000)
    one.add_argument("--objective", default="auto")
    one.set_defaults(run=ard)
    two = commands.add_parser("pixels")
    two.add_argument("--steps", type=int, default=100)
    two.add_argument("--out", required=True)
    two.set_defaults(run=pixels)
    for name, run in (("cen", cen), ("softmax", softmax)):
        command = commands.add_parser(name)
        command.add_argument("--epochs", type=int, default=10)
        command.add_argument("--batch", type=int, default=6000)
        command.add_argument("--rate", type=float, default=0.003)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--start", default="he", choices=["he", "published"])
        command.add_argument("--out", required=True)
        command.set_defaults(run=run)
        if name == "cen":
            command.add_argument("--published", action="store_true", help="the published objective")
        else:
            command.add_argument("--name", default="softmax")
    last = commands.add_parser("compare")
    last.add_argument("--out", required=True)
    last.set_defaults(run=compare)
    arguments = parser.parse_args(argv)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
