"""Level and power of the conditional independence test on made-up rows, by their number.

    python -m benchmarks.independence [--rows 50,100,200,500] [--repeats 400] [--draws 200] [--kinds linear,...]

For every kind of dependence and number of rows: the share of tests that reject at 5 and at 10 %. Under the null kinds
they should be 5 and 10 %, up to the binomial error that the first line gives; the others show power. Every repeat has
a seed of its own, which depends on its number only.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from benchmarks.defaults.__main__ import chosen
from kme_dist import conditional_independence_test

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
Made = Callable[[np.ndarray, np.ndarray, np.ndarray, np.random.Generator], Rows]


def _tails(z: np.ndarray, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> Rows:
    t = rng.standard_t(3, size=(2, *z.shape))
    return z + t[0], z**2 + t[1], z


def _three(z: np.ndarray, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> Rows:
    z = np.concatenate([z, rng.normal(size=(len(z), 2))], axis=1)
    return z.sum(axis=1, keepdims=True) + a, np.tanh(z[:, :1]) + z[:, 1:2] * z[:, 2:] + b, z


# From independent normal columns z, a, b. x and y are independent given z:
NULL: dict[str, Made] = {
    "neither": lambda z, a, b, rng: (a, b, z),
    "linear": lambda z, a, b, rng: (z + a, z + b, z),
    "confounded": lambda z, a, b, rng: (np.sin(2 * z) + 0.3 * a, z**2 + z + 0.5 * b, z),
    "wiggly": lambda z, a, b, rng: (np.sin(4 * z) + 0.3 * a, np.cos(4 * z) + 0.3 * b, z),
    "alike": lambda z, a, b, rng: (np.sin(3 * z) + 0.1 * a, np.sin(3 * z) + 0.1 * b, z),
    "steep": lambda z, a, b, rng: (z + 0.1 * a, z**3 / 3 + 0.1 * b, z),
    "scale": lambda z, a, b, rng: (z + np.abs(z) * a, z**2 + np.abs(z) * b, z),
    "tails": _tails,
    "three": _three,
}
# And these are not:
DEPENDENT: dict[str, Made] = {
    "weak": lambda z, a, b, rng: (z + a, z + 0.4 * a + b, z),
    "square": lambda z, a, b, rng: (z + a, z + 0.5 * a**2 + b, z),
    "opposite": lambda z, a, b, rng: (a, np.sign(z) * a + b, z),
}


def p_values(kind: str, rows: int, repeats: int, draws: int) -> np.ndarray:
    made, found = (NULL | DEPENDENT)[kind], []
    for number in range(repeats):
        rng = np.random.default_rng([number, rows])
        z, a, b = rng.normal(size=(3, rows, 1))
        found.append(conditional_independence_test(*made(z, a, b, rng), draws=draws).p_value)
    return np.array(found)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="50,100,200,500")
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--kinds", help=f"of {','.join(NULL | DEPENDENT)}")
    given = parser.parse_args(argv)
    kinds = chosen(given.kinds, NULL | DEPENDENT, "kind")
    error = 100 * math.sqrt(0.05 * 0.95 / given.repeats)
    print(f"{given.repeats} repeats: 5 % ± {error:.1f}", flush=True)
    for rows in map(int, given.rows.split(",")):
        for kind in kinds:
            began = time.process_time()
            p = p_values(kind, rows, given.repeats, given.draws)
            seconds = (time.process_time() - began) / given.repeats
            what = "level" if kind in NULL else "power"
            shown = ", ".join(f"{100 * np.mean(p <= level):.1f} % at {100 * level:.0f} %" for level in (0.05, 0.1))
            print(f"{rows:5} rows  {kind:11} {what} {shown}  ({1e3 * seconds:.0f} ms a test)", flush=True)


if __name__ == "__main__":
    main()
