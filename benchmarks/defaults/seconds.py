"""Processor seconds of `MCEClassifier().fit` on tables of 15,000 rows, on one core, all rows to learn from.

    OMP_NUM_THREADS=1 python -m benchmarks.defaults.seconds [--sets mnist-15k,covtype-15k,poker-15k]

The tables are those of the benchmark of defaults, whose splits learn from 11,250 of the rows.
"""

from __future__ import annotations

import argparse
import time

import kme_dist as kme
from benchmarks.defaults.rows import NAMES, table
from benchmarks.machine import load_average


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="mnist-15k,covtype-15k,poker-15k", help=f"of {','.join(NAMES)}")
    for name in parser.parse_args(argv).sets.split(","):
        X, y = table(name)
        before, began = time.process_time(), time.perf_counter()
        model = kme.MCEClassifier(n_jobs=1).fit(X, y)
        print(
            f"{name}: {len(y)} x {X.shape[1]}, {len(model.classes_)} classes, {model.solver_}: "
            f"{time.process_time() - before:.1f} processor seconds, {time.perf_counter() - began:.1f} s by the clock; "
            f"load {load_average()}",
            flush=True,
        )


if __name__ == "__main__":
    main()
