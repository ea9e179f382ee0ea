"""The page of the benchmarks, docs/benchmarks.md: for every part its command, what it printed, and pictures."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    name: str
    section: str
    title: str
    command: str  # after `python -m`


DEFAULTS, REGRESSION, STEP = "Classification by default", "Regression and tests", "One step of learning"
FIT, DATA, WORKERS = "Fit and prediction", "Data", "On several workers"
PARTS = (
    Part("simulate", WORKERS, "500 simulated workers on one real scheduler, calls of 2 s",
         "benchmarks.scale simulate --workers 500 --chunks 100000 --seconds 2"),
    Part("check", WORKERS, "Learn, fit and predict on 1, 2 and 4 workers, beside the model of `kme-dist plan`",
         "benchmarks.scale check"),
    Part("iterations", FIT, "20,000 centres on 400,000 rows: an iteration beside its bare tiles",
         "benchmarks.large iterations"),
    Part("direct", FIT, "Iterations and a direct solve, 2,000 centres", "benchmarks.large direct"),
    Part("linear", FIT, "Time and memory against rows", "benchmarks.large linear"),
    Part("nystroem", FIT, "50,000 rows, 1,024 centres, one and two cores, beside scikit-learn",
         "benchmarks.large nystroem"),
    Part("fit-100k", FIT, "100,000 rows of covtype beside scikit-learn's Nystroem and RidgeClassifier, two workers",
         "benchmarks.fit covtype --centres 2048 --rows 100000"),
    Part("fit-all", FIT, "The same on all its rows", "benchmarks.fit covtype --centres 2048"),
    Part("predict", FIT, "Prediction beside bare NumPy and scikit-learn, two workers",
         "benchmarks.predict throughput"),
    Part("predict-rows", FIT, "Prediction: time and memory against rows", "benchmarks.predict scale"),
    Part("means", FIT, "The mean of all kernel values of 200,000 rows", "benchmarks.means"),
    Part("gradient", STEP, "The RCB objective and its gradient, one thread", "benchmarks.gradient"),
    Part("features", STEP, "The same with explicit features", "benchmarks.features"),
    Part("seconds", DEFAULTS, "Seconds of the default fit on 15,000 rows, one core",
         "benchmarks.defaults.seconds"),
    Part("tails", DEFAULTS, "Features with heavy tails", "benchmarks.tails"),
    Part("memory", DEFAULTS, "100,000 rows of covtype in memory, two cores", "benchmarks.large memory"),
    Part("covtype", DEFAULTS, "All of covtype: `kme-dist run configs/covtype.yaml`, two cores",
         "benchmarks.large run"),
    Part("overhead", WORKERS, "What a round costs beyond the slowest of its batches", "benchmarks.rounds overhead"),
    Part("scaling", WORKERS, "Two workers against one", "benchmarks.rounds scaling"),
    Part("ingest", DATA, "Ingest, and reading batches, beside pyarrow and bare Zarr",
         "benchmarks.data_plane ingest batches prefetch"),
    Part("ingest-rows", DATA, "Memory of ingest against rows", "benchmarks.data_plane memory --rows 100000"),
    Part("independence", REGRESSION, "Level of the conditional independence test at 5 %",
         "benchmarks.independence"),
)  # fmt: skip

INTRODUCTION = """# Benchmarks

`make bench` writes this page and measures what is on it (an hour; `python -m benchmarks --list` names the parts), but
the two tables of classifiers and regressors, which take hours and have commands of their own. What follows is what
the commands printed. Ratios are of one run, in which both sides were measured. The machine is small on purpose, so
that anybody can repeat them. The load average is printed where it matters: above the number of cores, other programs
ran as well. The extra `bench` installs the libraries that are compared with, and the shared data sets are found by
`KME_DATA`.

What these figures mean for the choice of a method:
[when to choose this](index.md#when-to-choose-this-and-when-something-else).
"""

TABLES = {
    DEFAULTS: (
        "runs/defaults/summary.txt",
        "python -m benchmarks.defaults",
        """`MCEClassifier()` on 16 sets beside `SVC()`, a grid of SVCs, Gaussian processes, three gradient boosters,
nearest neighbours and logistic regression: accuracy, log loss, Brier score, calibration error and processor
seconds, five splits, each cell in a process of its own on one core. It takes hours; `--resume` after a kill
measures the rest, `--before COMMIT` adds an earlier `MCEClassifier()`, and report.html in its folder has the plots.
Test rows come from a fixed half of each set, the reserve; the defaults were chosen inside the other half
(`--development`, `benchmarks/defaults/rows.py`). Two of the five splits had been seen before the last changes for
speed and for repeated rows; the probability floor is older than the reserve.""",
    ),
    REGRESSION: (
        "runs/regression/summary.txt",
        "python -m benchmarks.regression",
        """`CMERegressor()` beside boosted trees and grids of kernel ridge and support vector regression, five
splits, one core each; see also [regression](regression.md#measured).""",
    ),
}
ORDER = (DEFAULTS, REGRESSION, STEP, FIT, DATA, WORKERS)
LAST = """## Published figures

`kme-dist reproduce TABLE` computes the tables and figures that are listed in [reproducing](reproducing.md), with the
published cells beside ours. `configs/iris_two_attributes.yaml` shows what figure 1 of Hsu, Nock and Ramos shows: an
overfitted and an underfitted start, chosen so that both have 56.67 % test accuracy, reach 73.33 %.
"""


def write_page(page: Path, folder: Path) -> None:
    """Write the page from the records in `folder`, and its pictures beside it."""
    pictures = page.parent / "assets" / "benchmarks"
    text = [INTRODUCTION]
    for section in ORDER:
        text.append(f"## {section}\n")
        text += _table(section, folder.parent)
        figures = []
        for part in (part for part in PARTS if part.section == section):
            record = _read(folder / f"{part.name}.json")
            text += _shown(part, record)
            figures += record["figures"] if record else []
        text += [_picture(name, figures, pictures) for name in dict.fromkeys(f["picture"] for f in figures)]
    page.write_text("\n".join([*text, LAST]), encoding="utf-8")


def _read(path: Path) -> dict | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _table(section: str, runs: Path) -> list[str]:
    if section not in TABLES:
        return []
    path, command, words = TABLES[section]
    found = runs.parent / path
    if not found.exists():
        return [f"{words}\n", f"`{command}`: not measured here; run it before `python -m benchmarks`.\n"]
    return [f"{words}\n", f"`{command}`:\n", f"```text\n{found.read_text(encoding='utf-8').rstrip()}\n```\n"]


def _shown(part: Part, record: dict | None) -> list[str]:
    head = f"### {part.title}\n"
    if record is None:
        return [head, f"`python -m {part.command}`: not measured here.\n"]
    minutes = record["seconds"] / 60
    ended = "" if record["exit_code"] == 0 else f" **It failed with exit code {record['exit_code']}.**"
    lines = "\n".join(re.sub(r"/\S*/(?=tmp|runs)", "", line) for line in record["output"])
    facts = f"{record['date']}, commit {record['commit']}, {minutes:.1f} minutes, load before {record['load_before']}"
    return [head, f"`{record['command']}` ({facts}; {record['machine']}).{ended}\n", f"```text\n{lines}\n```\n"]


def _picture(name: str, figures: list[dict], folder: Path) -> str:
    """Bars for every place by series, or lines if the places are numbers; returns the line of the page."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    own = [figure for figure in figures if figure["picture"] == name]
    series = {
        s: {f["at"]: f["value"] for f in own if f["series"] == s} for s in dict.fromkeys(f["series"] for f in own)
    }
    places = list(dict.fromkeys(f["at"] for f in own))
    values = [f["value"] for f in own]
    with plt.rc_context({"svg.hashsalt": "kme-dist", "font.size": 9}):
        picture, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
        if all(isinstance(place, int | float) for place in places):
            for label, points in series.items():
                axes.plot(list(points), list(points.values()), "o-", label=label)
            axes.set(xscale="log", yscale="log" if max(values) > 20 * min(values) else "linear", ylabel=name)
            axes.set_xlabel("rows")
            axes.set_ylim(bottom=0 if axes.get_yscale() == "linear" else None)
        else:
            width = 0.8 / len(series)
            for number, (label, points) in enumerate(series.items()):
                at = [places.index(place) + number * width for place in points]
                bars = axes.bar(at, list(points.values()), width, label=label)
                axes.bar_label(bars, fmt="%.3g", fontsize=7)
            axes.set_xticks([i + 0.4 - width / 2 for i in range(len(places))], places)
            axes.set(yscale="log" if max(values) > 20 * min(values) else "linear", ylabel=name)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"\W+", "-", name.lower()).strip("-")
        picture.savefig(folder / f"{slug}.svg", metadata={"Date": None})
        plt.close(picture)
    return f"![{name}](assets/benchmarks/{slug}.svg)\n"
