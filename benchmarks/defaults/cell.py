"""One cell of the table, in a process of its own: one model on one split of one set, on one core.

    python -m benchmarks.defaults.cell '{"set": "iris", "split": 0, "model": "svc", "development": false, "limit": 900}'

Prints what it has measured as a line of JSON after the labels, and once more after the probabilities, so that a process
killed in between still has an accuracy. `run` starts it and returns the record of the cell.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from benchmarks.defaults import figures, models
from benchmarks.defaults.rows import rows_of, table
from benchmarks.machine import load_average

ROOT = Path(__file__).parents[2]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


class Clock:
    """Seconds of a block, as `wall` and as processor time of all threads (`cpu`)."""

    def __enter__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error):
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu


def measure(task, emit):
    """Fit and evaluate; `emit` is called with all figures so far."""
    X, labels, Xq, labels_q = rows_of(task["set"], task["split"], task["development"])
    classes = len(np.unique(table(task["set"])[1]))
    known, y = np.unique(labels, return_inverse=True)  # some libraries require 0, 1, ... without gaps
    entry = models.MODELS[task["model"]]
    found = {"train": len(y), "test": len(labels_q), "features": X.shape[1], "classes": classes}
    found["versions"] = models.versions(entry)
    empty = models.why_empty(entry, len(y))
    if empty:
        emit({**found, "status": "empty", "reason": empty})
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimator, kept = entry.build(X, y), models.fit_rows(entry, y)  # imports its library
        with Clock() as fit:
            fitted = estimator.fit(X[kept], y[kept])
        with Clock() as predict:
            predicted = fitted.predict(Xq)
        found["accuracy"] = float(np.mean(known[predicted] == labels_q))
        found |= {"fit_cpu": fit.cpu, "fit_wall": fit.wall, "predict_cpu": predict.cpu, "predict_wall": predict.wall}
        if task.get("labels_only"):  # its probabilities took too long on another split
            emit({**found, "status": "over", "reason": "probabilities over the limit on another split"})
            return
        emit({**found, "status": "labels"})
        with Clock() as more:
            probable = models.Calibrated(fitted, X, y) if entry.calibrated else fitted
        with Clock() as predict:
            P = probable.predict_proba(Xq)
    P = figures.on_all_classes(P, known[probable.classes_], classes)
    found |= {
        "log_loss": figures.log_loss(P, labels_q),
        "brier": figures.brier(P, labels_q),
        "calibration": figures.calibration_error(P, labels_q),
        "reliability": figures.reliability(P, labels_q).round(6).tolist(),
        "calibrate_cpu": more.cpu,
        "calibrate_wall": more.wall,
        "probabilities_cpu": predict.cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "warnings": sorted({str(w.message).splitlines()[0][:120] for w in caught})[:5],
    }
    emit({**found, "status": "ok"})


def run(task, source=None, module="benchmarks.defaults.cell"):
    """The record of a cell, measured in a child process that ends after `task["limit"]` processor seconds.

    `module` is called with the task as JSON and prints figures as `measure` does.
    """
    argument = json.dumps({**task, "source": source and str(source)})
    began = time.time()
    ended = {"load": load_average()}
    try:
        child = subprocess.run(
            [sys.executable, "-m", module, argument],
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD},
            capture_output=True,
            text=True,
            timeout=20 * task["limit"] + 60,  # a process that hangs uses no processor time
        )
        code, out, error = child.returncode, child.stdout, child.stderr
    except subprocess.TimeoutExpired as late:
        code, out, error = None, (late.stdout or b"").decode(), f"no result after {late.timeout} s"
    lines = out.splitlines()
    found = json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}
    if code == -signal.SIGXCPU:
        ended["status"], ended["reason"] = "over", f"over {task['limit']:g} s"
    elif found.get("status") not in ("ok", "empty", "over") or code != 0:
        # the last line of a traceback, or what the system did
        ended["status"], ended["reason"] = "failed", (error.strip().splitlines() or [f"ended with {code}"])[-1][:200]
    return {**task, **found, **ended, "began": round(began)}


def main(argument):
    task = json.loads(argument)
    limit_seconds(task["limit"])
    if task.get("source"):
        models.use_source(Path(task["source"]))
    measure(task, emit)


def limit_seconds(limit):
    """End this process after so many processor seconds."""
    whole = math.ceil(limit)
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 5))


def emit(found):
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
