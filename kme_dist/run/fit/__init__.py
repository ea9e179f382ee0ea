"""The final fit on all rows of a data set larger than memory: one interface, one module per solver.

    fit = fit_on_dataset(data, kernel, 1e-4, executor=executor, scratch="run/scratch")
    fit.embedding.decision(X);  fit.solver, fit.reason;  fit.loss, fit.residual, fit.iterations, fit.seconds

For n rows, m classes, p centres or features, tiles of t rows, a preconditioner of rank r, numbers of s bytes:

    solver     module      for                      bytes per worker           bytes in scratch       flops
    cholesky   cholesky    up to about 12,000 rows  2 n² s                     -                      n³/3
    tiled      tiled       up to ~100,000 rows      5 t² s                     (n² + nt)/2 s          n³/3
    pcg        pcg         up to ~100,000 rows      (t² + tr) s + 16 nm        ((n² + nt)/2 + 2nr) s  nr² + 2n²m a step
    nystrom    centres     any number of rows       (p² + 4096 p)(8 + s)       32 p²                  np² + p³/3
    falkon     falkon      any number of rows       (256 p + 6 t²) s + 48 pm   2 p² s                 2np(d + 2m) a step
    features   features    any number of rows       as nystrom                 as nystrom             as nystrom

λ is retuned by the leave-one-out log loss of at most 4,000 rows (falkon: of rows held out). `auto` takes the exact
solver if its work is affordable, else centres, and gives the reason (`choose`, which reads the costs). The result
depends on data and settings, never on the number of workers. Additive models (nystrom, features) keep their
`FitStatistics`: chunks can be added and removed, and `refit` solves again without reading old rows.

Control flow: `driver.fit_on_dataset` makes a `Problem` of the rows, `choose.choose` picks the solver, whose `prepare`
returns an object that can evaluate a λ (`leave_one_out`), `solve` for it and measure the `residual`; the result is a
`Fit`.

Adding a solver:
1. a module here with `cost(size) -> Cost` and `prepare(problem) -> Prepared` (`problem.py` has the interface);
2. an exact solver extends `exact.Exact` with `solve`; one based on sums gives `equations.Equations` a basis;
3. register it in `choose.SOLVERS`, and decide in `choose` when "auto" takes it;
4. add a line to the table above and its name to `kme_dist.config` (section `fit`);
5. add it to the tables of tests/run/test_solver_agreement.py and tests/run/test_fit.py: same result, same bits.
"""

from kme_dist.run.fit.additive import FitStatistics, add_rows, gather, remove_rows
from kme_dist.run.fit.choose import SOLVERS, Choice, choose
from kme_dist.run.fit.driver import fit_on_dataset, refit
from kme_dist.run.fit.problem import Cost, Fit, Prepared, Problem, Room, Size, Solved, Solver

__all__ = [
    "SOLVERS",
    "Choice",
    "Cost",
    "Fit",
    "FitStatistics",
    "Prepared",
    "Problem",
    "Room",
    "Size",
    "Solved",
    "Solver",
    "add_rows",
    "choose",
    "fit_on_dataset",
    "gather",
    "refit",
    "remove_rows",
]
