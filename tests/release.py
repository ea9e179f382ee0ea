"""A release as a stranger meets it: sdist and wheel are built, and each is installed into an empty environment, where
`kme-dist doctor` and the job of `make run` must succeed without the repository.

    python tests/release.py [--keep FOLDER]     as `make release-test` does; some minutes

Checked besides: the metadata, what the wheel contains, that its version is that of the package, that every public name
can be imported from it, and that the installed commands need nothing from the current folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST_ACCURACY = 0.95  # of the digits; the run itself has about 99 %


def call(*command: str | Path, cwd: Path, environment: dict[str, str] | None = None) -> str:
    """The output of a command; if it fails, its last lines and an exit."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed with exit code {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def clean_environment(folder: Path) -> dict[str, str]:
    """Variables of a new user: nothing that points into the repository or another environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "KME_"))}
    return {**kept, "HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin", "MPLBACKEND": "Agg"}


def built(folder: Path) -> tuple[Path, Path]:
    """(sdist, wheel): the wheel is built from the sdist, so that what the sdist lacks is noticed."""
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    call(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=folder)
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    info = wheel.name.split("-py3")[0] + ".dist-info"
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kme_dist").rglob("*.py")}
    wanted = sources | {"kme_dist/py.typed", "kme_dist/tiles.cu", f"{info}/licenses/LICENSE"}
    wanted |= {f"kme_dist/pipelines/{p.name}" for p in (ROOT / "pipelines").glob("*.py")}
    if missing := wanted - inside:
        sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    if extra := {name.split("/")[0] for name in inside} - {"kme_dist", info}:
        sys.exit(f"{wheel.name} would install {', '.join(sorted(extra))} at the top level")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "configs/digits.yaml",
        "Makefile",
    }
    if missing := wanted - names:
        sys.exit(f"{sdist.name} lacks {', '.join(sorted(missing))}")


NAMES = """
import json, pathlib, sys
import kme_dist
for name in kme_dist.__all__:
    getattr(kme_dist, name)
print(json.dumps([str(pathlib.Path(kme_dist.__file__).parents[1]), kme_dist.__version__]))
"""


def install_and_run(artefact: Path, sdist: Path, folder: Path) -> None:
    """An empty environment, the artefact, and what the README promises of it."""
    start = time.monotonic()
    folder.mkdir()
    environment, home = clean_environment(folder), folder / "home"
    home.mkdir()
    call(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    call(*pip, "--constraint", ROOT / "constraints.txt", artefact, cwd=home, environment={**os.environ})
    call(python, "-m", "pip", "check", cwd=home, environment=environment)
    where, version = json.loads(call(python, "-c", NAMES, cwd=home, environment=environment).splitlines()[-1])
    if not where.startswith(str(folder)) or version not in artefact.name:
        sys.exit(f"{artefact.name}: imported version {version} from {where}")
    program = folder / "venv" / "bin" / "kme-dist"
    if call(program, "--version", cwd=home, environment=environment).split() != ["kme-dist", version]:
        sys.exit(f"{artefact.name}: kme-dist --version is not {version}")
    call(program, "doctor", cwd=home, environment=environment)
    with tarfile.open(sdist) as archive:
        (member,) = [m for m in archive.getmembers() if m.name.endswith("/configs/digits.yaml")]
        config = archive.extractfile(member)
        assert config is not None
        (home / "digits.yaml").write_bytes(config.read())
    result = json.loads(call(program, "run", "digits.yaml", "--quiet", "--json", cwd=home, environment=environment))
    report = home / result["report"]
    if not report.exists() or result["accuracy"] < LEAST_ACCURACY:
        sys.exit(f"{artefact.name}: accuracy {result['accuracy']}, report {report}")
    rows = "import sklearn.datasets as d; f = d.load_digits(as_frame=True).data; f[:20].to_csv('new.csv', index=False)"
    call(*pip, "--constraint", ROOT / "constraints.txt", "pandas", cwd=home, environment={**os.environ})
    call(python, "-c", rows, cwd=home, environment=environment)
    call(program, "predict", "--model", "runs/digits", "--data", "new.csv", "--out", "scores.csv", cwd=home,
         environment=environment)  # fmt: skip
    if len((home / "scores.csv").read_text().splitlines()) != 21:
        sys.exit(f"{artefact.name}: scores.csv must have a header and 20 rows")
    print(f"{artefact.name}: doctor, run ({100 * result['accuracy']:.1f} %) and predict succeeded in an empty "
          f"environment, {time.monotonic() - start:.0f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="also put sdist and wheel there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        sdist, wheel = built(folder / "dist")
        check_contents(sdist, wheel)
        for artefact, name in ((wheel, "from-wheel"), (sdist, "from-sdist")):
            install_and_run(artefact, sdist, folder / name)
            shutil.rmtree(folder / name)
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            for artefact in (sdist, wheel):
                shutil.copy(artefact, given.keep)


if __name__ == "__main__":
    main()
