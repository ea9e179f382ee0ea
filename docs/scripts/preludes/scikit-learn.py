"""A fitted model and rows to test it on."""

import matplotlib

matplotlib.use("Agg")

from sklearn.datasets import load_iris
from sklearn.model_selection import train_test_split

import kme_dist as kme

_X, X_test, _y, y_test = train_test_split(*load_iris(return_X_y=True), random_state=0)
model = kme.MCEClassifier(steps=20).fit(_X, _y)
probabilities = model.predict_proba(X_test)
