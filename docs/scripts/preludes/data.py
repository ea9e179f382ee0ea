"""A file to ingest; tables, texts and bags with labels."""

import numpy as np
import pandas as pd

rng = np.random.default_rng(0)
columns = {f"Feature_{i}": rng.normal(size=2500).round(3) for i in range(5)}
pd.DataFrame({**columns, "Cover_Type": rng.integers(1, 4, 2500)}).to_csv("covtype.csv", index=False)

y = np.repeat(["left", "right"], 30)
frame = pd.DataFrame(
    {"width": rng.normal(size=60) + (y == "left"), "colour": rng.choice(["red", "blue"], 60), "kind": y}
)
other_frame = frame[["kind", "colour", "width"]]
texts = [("abab" if kind == "left" else "cdcd") + "xyz"[i % 3] for i, kind in enumerate(y)]
bags = [rng.normal(kind == "left", 1.0, size=(5 + i % 4, 2)) for i, kind in enumerate(y)]
