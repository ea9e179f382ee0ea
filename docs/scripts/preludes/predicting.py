"""A model, a run, rows of a data set and of a file, the client of a cluster."""

import subprocess

import numpy as np
import pandas as pd
from distributed import Client
from sklearn.datasets import make_moons

import kme_dist as kme

X, y = make_moons(1500, noise=0.2, random_state=0)
frame = pd.DataFrame({"width": X[:, 0], "height": X[:, 1]})
frame.assign(kind=np.array(["left", "right"])[y]).to_csv("people.csv", index=False)
frame[::5].to_csv("new.csv", index=False)
with open("people.yaml", "w") as config:
    config.write("data: {source: people.csv, label: kind}\nmodel: {objective: median}\ncluster: {kind: serial}\n")
    config.write("output: {folder: runs/people}\n")
subprocess.run(["kme-dist", "run", "people.yaml", "--quiet"], check=True)

clf = model = kme.MCEClassifier(objective="median").fit(frame, y)
kme.MCEClassifier(objective="median").fit(X, y).save("model.zarr")
kme.ingest((X, y), "rows.zarr")
client = Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0")
