"""An open data set, a learned kernel, an executor."""

import numpy as np

import kme_dist as kme
from kme_dist.run.executors import SerialExecutor

rng = np.random.default_rng(0)
rows = rng.uniform(size=(5000, 2))
data = kme.ingest((rows, (rows.sum(axis=1) > 1).astype(int)), "rows.zarr")
kernel = kme.kernels.Gaussian(length_scale=[2.0, 2.0])
executor = SerialExecutor()
