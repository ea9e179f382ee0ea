"""A data set of 54 features, and the client of a cluster."""

import numpy as np
from distributed import Client

import kme_dist as kme

rng = np.random.default_rng(0)
rows = rng.normal(size=(600, 54))
kme.ingest((rows, (rows[:, 0] > 0).astype(int)), "data/covtype.zarr", shuffle=0)
client = Client(processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0")
