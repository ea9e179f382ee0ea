"""The final fit on all rows of a data set that no process holds: one interface, one module a solver.

    fit = fit_on_dataset(data, kernel, 1e-4, executor=executor, scratch="run/scratch")
    fit.embedding.decision(X);  fit.solver, fit.reason;  fit.loss, fit.residual, fit.iterations, fit.seconds

With n rows, m classes, p centres or features, tiles of t rows, a preconditioner of rank r, numbers of s bytes:

    solver     module      for                      bytes in one worker        in the scratch place   flops
    cholesky   cholesky    up to about 12,000 rows  2 n² s                     -                      n³/3
    tiled      tiled       up to some 100,000 rows  5 t² s                     (n² + nt)/2 s          n³/3
    pcg        pcg         up to some 100,000 rows  (t² + tr) s + 16 nm        ((n² + nt)/2 + 2nr) s  nr² + 2n²m a step
    nystrom    centres     any number of rows       (p² + 4096 p)(8 + s)       32 p²                  np² + p³/3
    features   features    any number of rows       the same                   the same               the same

λ is chosen again by leave-one-out log loss, of at most 4,000 rows. `auto` takes the exact solver that ends within a
minute, else centres, and says why (`choose`, which reads the costs). What comes out depends on data and settings, never
on the number of workers. Models of sums (nystrom, features) keep their `Statistics`: chunks are added and removed, and
`refit` solves again without a look at old rows.

A walk: `driver.fit_on_dataset` makes a `Problem` of the rows, `choose.choose` names the solver, its `prepare` returns
what can evaluate a λ (`leave_one_out`), `solve` for it, and measure the `residual`; the record of it all is a `Fit`.

Adding a solver:
1. a module here with `cost(size) -> Cost` and `prepare(problem) -> Prepared` (`problem.py` has the interface);
2. for an exact one extend `exact.Exact` by `solve`; for one of sums bring a basis to `equations.Equations`;
3. name it in `choose.SOLVERS`, and say in `choose` when "auto" takes it;
4. a line in the table above, its name in `kme_dist.config` (section `fit`);
5. add it to the tables of tests/run/test_solver_agreement.py and tests/run/test_fit.py: same answer, same bits.
"""

from kme_dist.run.fit.additive import Statistics, add_rows, gather, remove_rows
from kme_dist.run.fit.choose import SOLVERS, Choice, choose
from kme_dist.run.fit.driver import fit_on_dataset, refit
from kme_dist.run.fit.problem import Cost, Fit, Prepared, Problem, Size, Solved, Solver

__all__ = [
    "SOLVERS",
    "Choice",
    "Cost",
    "Fit",
    "Prepared",
    "Problem",
    "Size",
    "Solved",
    "Solver",
    "Statistics",
    "add_rows",
    "choose",
    "fit_on_dataset",
    "gather",
    "refit",
    "remove_rows",
]
