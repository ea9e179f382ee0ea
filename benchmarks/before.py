"""The code as it is beside the code as it was: `python -m benchmarks.before REV [--repeats 3]`.

Checks out REV into a temporary folder and runs the same work with both, alternating, in processes of their own with one
BLAS thread: a step of learning (median over the steps of a fit), the default fit of the digits, and predictions. Prints
the seconds of each and the ratio after / before of the fastest runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import load_average

ROOT = Path(__file__).parents[1]
# Only names that both have: the public ones.
WORK = """
import json, sys, time
import numpy as np
import kme_dist as kme
from sklearn.datasets import load_digits

X, y = load_digits(return_X_y=True)
found = {}
began = time.perf_counter()
model = kme.MCEClassifier().fit(X, y)
found["default fit of digits"] = time.perf_counter() - began
began = time.perf_counter()
model.predict_proba(np.tile(X, (5, 1)))
found["predict_proba of 8,985 rows"] = time.perf_counter() - began
rng = np.random.default_rng(0)
X = rng.normal(size=(8000, 20))
y = (X[:, 0] + 0.3 * rng.normal(size=len(X)) > 0).astype(int)
for rows in (500, 1000, 2000):
    settings = dict(objective="rcb", steps=30, batch_size=rows, refit_regularization=False)
    model = kme.MCEClassifier(solver="nystrom", centres=50, **settings).fit(X, y)
    seconds = np.diff([record["seconds"] for record in model.history_])
    found[f"a step of {rows} rows"] = float(np.median(seconds))
json.dump(found, sys.stdout)
"""


def measure(folder: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # PYTHONPATH comes before the editable install.
    ended = subprocess.run(
        [sys.executable, "-c", WORK], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        git = ["git", "-C", ROOT, "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", before, given.revision], check=True)
        try:
            runs = [(measure(before), measure(ROOT)) for _ in range(given.repeats)]
        finally:
            subprocess.run([*git, "remove", "--force", before], check=True)
    print(f"load {load_average()}; fastest of {given.repeats} runs each, alternating")
    for name in runs[0][0]:
        old, new = (min(run[i][name] for run in runs) for i in (0, 1))
        print(f"{name:30s} before {old:8.4f} s   after {new:8.4f} s   after / before {new / old:.2f}")


if __name__ == "__main__":
    main()
