"""Rows and numeric targets."""

from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

X, X_test, y, y_test = train_test_split(*load_diabetes(return_X_y=True), random_state=0)
X_new = X_test[:20]
