"""What an installation of kme-dist contains: a parts list (SBOM), and whether its licences allow to redistribute it.

    python tests/licences.py [--out FOLDER]      as `make sbom` does

Installs the package without extras into an empty environment and writes build/sbom.json (CycloneDX) and
build/licences.md. A package whose licence is not in ALLOWED fails the check: read the licence, then add it here or
drop the dependency.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = {"pip", "setuptools", "wheel"}  # of the environment, not of the installation
# Licences that allow redistribution without conditions on our own code, by a piece of how packages write them.
ALLOWED = (
    "Apache", "BSD", "MIT", "Python Software Foundation", "PSF", "ISC", "Zlib", "0BSD", "HPND", "Unlicense",
    "Mozilla Public License 2.0", "MPL-2.0", "CC0", "MIT-CMU", "Matplotlib",
)  # fmt: skip
# Words of licences with conditions on what they are combined with; "or" between two licences gives a choice.
REFUSED = ("GPL", "AGPL", "SSPL", "Commons Clause", "Proprietary")


def refusal(licence: str) -> str | None:
    """Why a licence is not accepted; None if it is. `A AND B` needs both, `A OR B` one of them."""
    for part in licence.replace(";", " AND ").split(" AND "):
        choices = part.split(" OR ")
        if not any(_accepted(choice) for choice in choices):
            return f"{part.strip()!r} is not among the licences that are allowed"
    return None


def _accepted(licence: str) -> bool:
    plain = licence.strip(" ()")
    # Libraries that are linked, not copied: the runtime of Fortran inside SciPy, for example.
    exempt = "GCC-exception" in plain or "LGPL" in plain
    if any(word in plain for word in REFUSED) and not exempt:
        return False
    return exempt or any(word.lower() in plain.lower() for word in ALLOWED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run([sys.executable, "-m", "uv", "venv", "--quiet", folder / "venv"], check=True)
        inside = folder / "venv" / "bin" / "python"
        pip = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", inside]
        subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", str(ROOT)], check=True, env={**os.environ})
        sbom = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON"]
        subprocess.run([*sbom, "--pyproject", ROOT / "pyproject.toml", "-o", out / "sbom.json", inside], check=True)
        listed = subprocess.run(
            [sys.executable, "-m", "piplicenses", "--python", str(inside), "--format", "json", "--from", "mixed"],
            check=True, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
    packages = [p for p in json.loads(listed.stdout) if p["Name"].lower() not in TOOLS]
    lines = ["| package | version | licence |", "|---|---|---|"]
    lines += [f"| {p['Name']} | {p['Version']} | {' '.join(p['License'].split())[:80]} |" for p in packages]
    (out / "licences.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    wrong = [(p["Name"], refusal(p["License"])) for p in packages]
    wrong = [(name, why) for name, why in wrong if why]
    for name, why in wrong:
        print(f"{name}: {why}", file=sys.stderr)
    parts = len(json.loads((out / "sbom.json").read_text(encoding="utf-8"))["components"])
    print(f"{len(packages)} packages, {len(wrong)} with a licence that is not allowed; {parts} parts in sbom.json")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
