"""All tests of deploy/, the slow ones included; at the end one line for each part that ran and each that did not.

make deploy-test            # installs the tools first
.venv/bin/python tests/deploy/run_all.py -k slurm
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PARTS = {
    "test_helm.py": "Helm chart: rendered by helm, checked against schemas, compared with the plain manifests",
    "test_kubernetes.py": "Kubernetes manifests: schemas of Kubernetes, Dask operator and Prometheus operator",
    "test_debian.py": "systemd: installed on a fresh Debian root, booted, a job run, a scheduler killed, scraped",
    "test_units.py": "systemd units, cron and kme-retry: systemd-analyze, shellcheck, exit codes",
    "test_slurm.py": "Slurm: the scripts on a real Slurm of one node",
    "test_engine.py": "compose: `up --wait` and the smoke test on a real container engine",
    "test_compose.py": "compose file: specification, rights, certificates, and its commands without an engine",
    "test_image.py": "Dockerfile: hadolint, checkov, built with buildah",
    "test_prometheus.py": "alerts and dashboard: promtool and its unit tests",
    "test_settings.py": "settings of Dask: yamllint, keys, a real scheduler",
    "test_command_lines.py": "command lines of all files: the parsers of the programs",
    "test_runbook.py": "docs/operations.md: every command run, or checked",
}

# On no machine: their programs are in no package that could be installed, or need hardware.
NEVER = (
    "a Kubernetes cluster: no package has its server; resources are rendered and validated, not applied",
    "GPU workers of Kubernetes and Slurm: they need a GPU; options and schemas are checked",
    "Slurm on several nodes: there is one machine",
    "the images of the object store: there is no registry; an S3 server of the tests stands in",
)


class Summary:
    """Counts outcomes by file, and reasons of skipped tests."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = Path(report.nodeid.split("::")[0]).name
        self.seconds[name] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name][report.outcome if report.when == "call" or report.skipped else "failed"] += 1
        if report.skipped:
            self.reasons[name][str(report.longrepr[2]).removeprefix("Skipped: ")] += 1

    def lines(self) -> list[str]:
        found = []
        for name, part in PARTS.items():
            counts = self.outcomes[name]
            if counts["passed"] or counts["failed"]:
                verdict = f"FAILED ({counts['failed']}) " if counts["failed"] else "ran     "
                found.append(f"{verdict} {part}: {counts['passed']} tests passed in {self.seconds[name]:.0f} s")
        for name, reasons in self.reasons.items():
            found += [
                f"not run  {PARTS[name].split(':')[0]}: {count} tests: {' '.join(why.split())}"
                for why, count in reasons.items()
            ]
        return found + [f"not run  {what}" for what in NEVER]


def main() -> int:
    summary = Summary()
    files = [str(HERE), str(HERE.parent / "ops" / "test_prometheus.py")]
    code = pytest.main(["-m", "not gpu and not paper", "-q", "--timeout=1800", *files, *sys.argv[1:]], [summary])
    print("\nmake deploy-test:")
    print("\n".join(summary.lines()))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
