"""The code blocks of the documentation, tested: a page is followed from top to bottom in an empty folder.

    python -m docs.scripts.blocks               all pages, as `make docs-test` does
    python -m docs.scripts.blocks PAGE...       some of them, e.g. docs/tutorial/laptop.md

| block | what happens |
|---|---|
| python | run, in the order of the page, in one interpreter |
| bash, sh | run in the pages of FOLLOWED (those a newcomer types along), else every `kme-dist` line is parsed |
| yaml | checked against the schema of configs, or as a function for `--expectation` |
| no language, text, indented | every line that starts with `kme-dist` is parsed by the command line |
| ... needs=THING | syntax only, and counted: it requires a THING that may be absent |

A page may assume rows and names that its reader has; they are made by docs/scripts/preludes/PAGE.py. The folder has a
copy of configs/ and a link .venv, as a clone has. Port 8786 of this machine becomes a free one.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRELUDES = Path(__file__).parent / "preludes"
FOLLOWED = ("docs/index.md", "docs/choosing.md", "docs/faq.md", "docs/formats.md", "docs/tutorial/", "docs/recipes/")
# Blocks of pages without a mark, by a piece of their text, and what they require. Each must match one block.
REQUIRED = {
    ("README.md", "tls://scheduler:8786"): "cluster",
}
# Quick settings: what is replaced in the blocks of a page so that it runs in seconds. Each must be found.
QUICK = {
    "docs/data.md": {"data.read_rows(0, 2000)": "data.read_rows(0, 60)"},
    "docs/learning.md": {"steps=300, batch_size=2000": "steps=3, batch_size=200"},
}
# Pages whose shell blocks have a test of their own, which runs them.
ELSEWHERE = {"docs/operations.md": "tests/deploy/test_runbook.py", "deploy/README.md": "tests/deploy/test_runbook.py"}
SHELL, TEXT = ("bash", "sh"), ("", "text", "console")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Block:
    page: str  # relative to the repository
    line: int  # of its first line of code
    language: str
    needs: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy" / "README.md"]
    found += sorted((ROOT / "docs").rglob("*.md"))
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, with what they require."""
    found = blocks_of_text(page, (ROOT / page).read_text(encoding="utf-8"))
    for slow in QUICK.get(page, {}):
        if not any(slow in block.text for block in found):
            raise ValueError(f"{page}: {slow!r} is in no block; change QUICK")
    for (where, piece), thing in REQUIRED.items():
        if where == page:
            matching = [i for i, block in enumerate(found) if piece in block.text]
            if len(matching) != 1:
                raise ValueError(f"{page}: {piece!r} must be in one block, found in {len(matching)}; change REQUIRED")
            found[matching[0]] = dataclasses.replace(found[matching[0]], needs=thing)
    return found


def blocks_of_text(page: str, text: str) -> list[Block]:
    """Fenced blocks, and indented ones outside of them."""
    found: list[Block] = []
    fence: tuple[int, str, str] | None = None
    body: list[str] = []
    indented: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        opening = re.fullmatch(r"```(\w*)(?: needs=([\w-]+))?(?: \w+=\".*\")?", line)
        if fence is not None:
            if line == "```":
                found.append(Block(page, fence[0], fence[1], fence[2], "\n".join(body) + "\n"))
                fence, body = None, []
            else:
                body.append(line)
        elif opening:
            fence = (number + 1, opening.group(1), opening.group(2) or "")
        elif line.startswith("```"):
            raise ValueError(f"{page}:{number}: a fence must be ```LANGUAGE or ```LANGUAGE needs=THING, got {line}")
        elif line.startswith("    "):
            indented.append(line)
            continue
        if indented:
            found.append(Block(page, number - len(indented), "", "", "\n".join(indented) + "\n"))
            indented = []
    return found


# -------------------------------------------------------------------------------------------------
# Without running


def commands_of(block: Block) -> Iterator[list[str]]:
    """Every call of kme-dist in a block as words: brackets of a synopsis, redirections and comments are removed."""
    text = re.sub(r"(?ms)<< '(\w+)'\n.*?^\1$", "", block.text.replace("\\\n", " "))
    for line in text.splitlines():
        line = re.sub(r"\[|\]|\s#.*$", " ", line) if block.language in TEXT else re.sub(r"\s#.*$", "", line)
        for part in re.split(r"\|\||&&|[|;&]", line):
            call = re.match(r"\s*(?:\w+=\S*\s+)*kme-dist (?!\.\.\.)(.*)", part)  # NAME=value may precede it
            if call:
                yield shlex.split(re.sub(r"[<>]\s*\S+", "", call.group(1)), comments=True)


def command_error(words: list[str]) -> str | None:
    """Why the command line refuses these words; None if it takes them."""
    import typer

    from kme_dist.cli import app as cli

    command: Any = typer.main.get_command(cli.app)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in command.commands:
            return f"no such command: {name}"
        command = command.commands[name]
    if hasattr(command, "commands"):
        return None if all(word in ("--help", "--version", "--install-completion") for word in rest) else "no command"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            command.make_context(words[0], rest)
    except cli.ClickException as error:
        return str(error.format_message())
    except typer.Exit:
        return None
    return None


def yaml_error(block: Block) -> str | None:
    """Why a block of YAML is neither a config (or sections of one) nor a function of the label."""
    from kme_dist.config.files import Config, parse_config, parse_yaml
    from kme_dist.errors import KMEError

    try:
        tree = parse_yaml(block.text, block.where)
        if not isinstance(tree, dict):
            return "must be a mapping"
        if set(tree) <= {"values", "default", "expression"}:
            return None
        if set(tree) <= set(Config.model_fields):
            parse_config({"data": {"source": "table.csv"}, **tree}, block.where)
            return None
        return f"unknown sections: {', '.join(sorted(set(tree) - set(Config.model_fields)))}"
    except KMEError as error:
        return str(error)


def static_errors(block: Block) -> list[str]:
    """What is wrong with a block as far as can be seen without running it."""
    try:
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "yaml":
            error = yaml_error(block)
            return [f"{block.where}: {error}"] if error else []
        elif block.language in (*SHELL, *TEXT):
            found = [(words, command_error(words)) for words in commands_of(block)]
            return [f"{block.where}: kme-dist {' '.join(words)}: {error}" for words, error in found if error]
        else:
            return [f"{block.where}: blocks of {block.language!r} are not tested; use python, bash, yaml or text"]
    except SyntaxError as error:
        return [f"{block.where}: {error}"]
    return []


# -------------------------------------------------------------------------------------------------
# Running


def outcome_of(block: Block) -> str:
    """What the runner does with a block: one word, counted in the end."""
    if block.needs:
        return f"requires {block.needs}"
    if block.language == "python":
        if "import torch" in block.text and importlib.util.find_spec("torch") is None:
            return "requires torch"
        return "run"
    if block.language in SHELL and block.page in ELSEWHERE:
        return "run elsewhere"
    if block.language in SHELL and block.page.startswith(FOLLOWED):
        return "run"
    if block.language == "yaml":
        return "validated"
    return "parsed" if any(commands_of(block)) else "text"


def follow(page: str, folder: Path) -> dict[str, Any]:
    """Run a page in this process, in a folder; counts of outcomes, and the first error if there is one."""
    counts: Counter[str] = Counter()
    found = blocks_of(page)
    wrong = [error for block in found for error in static_errors(block)]
    if wrong:
        return {"counts": {}, "errors": wrong}
    _furnish(folder)
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    prelude = PRELUDES / f"{Path(page).stem.lower()}.py"
    port = _free_port()
    if prelude.exists() and any(outcome_of(block) == "run" for block in found):
        exec(compile(prelude.read_text(encoding="utf-8"), str(prelude), "exec"), names)
    for block in found:
        outcome = outcome_of(block)
        counts[f"{block.language or 'text'}: {outcome}"] += 1
        if outcome != "run":
            continue
        text = block.text.replace("127.0.0.1:8786", f"127.0.0.1:{port}")
        for slow, quick in QUICK.get(page, {}).items():
            text = text.replace(slow, quick)
        try:
            if block.language == "python":
                # Line numbers of errors are those of the page.
                exec(compile("\n" * (block.line - 1) + text, page, "exec"), names)
            else:
                _shell(text, folder)
        except BaseException:
            return {"counts": dict(counts), "errors": [f"{block.where}\n{traceback.format_exc(limit=-3)}"]}
    return {"counts": dict(counts), "errors": []}


def _furnish(folder: Path) -> None:
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / ".venv").symlink_to(sys.prefix)


def _shell(text: str, folder: Path) -> None:
    """Run a block by bash; exported variables last until the end of the page, and so do commands in the background."""
    state = folder / ".exported"
    script = f'set -euo pipefail\n[ ! -e "{state}" ] || . "{state}"\n{text}\nexport -p > "{state}"\n'
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=TIMEOUT_S
        )
        output.seek(0)
        shown = output.read().decode(errors="replace")
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} of\n{text}\n{shown[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def follow_apart(page: str) -> dict[str, Any]:
    """Run a page in a process and folder of its own; whatever it started ends with it."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
    }
    for name in ("KME_ROOT", "KME_TLS", "KME_STORES"):
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "docs.scripts.blocks", "--here", str(work), str(result), page]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                child.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return {"counts": {}, "errors": [f"{page}: not finished after {TIMEOUT_S} s"]}
            finally:
                _end_group(child.pid)
        if not result.exists():
            return {"counts": {}, "errors": [f"{page}: {log.read_text(errors='replace')[-2000:]}"]}
        return dict(json.loads(result.read_text(encoding="utf-8")))


def _end_group(group: int) -> None:
    """End what a page started and left: first by request, then by force."""
    for number, wait in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 0.5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            end = time.monotonic() + wait
            while time.monotonic() < end:
                time.sleep(0.05)
                os.killpg(group, 0)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--here"]:
        folder, result, page = arguments[1:]
        Path(result).write_text(json.dumps(follow(page, Path(folder))), encoding="utf-8")
        return 0
    total: Counter[str] = Counter()
    failed = 0
    for page in arguments or pages():
        start = time.monotonic()
        found = follow_apart(page)
        total.update(found["counts"])
        failed += bool(found["errors"])
        shown = ", ".join(f"{count} {name}" for name, count in sorted(found["counts"].items())) or "no blocks"
        print(
            f"{'FAILED' if found['errors'] else 'ok':6} {page} ({time.monotonic() - start:.0f} s): {shown}", flush=True
        )
        for error in found["errors"]:
            print(error, file=sys.stderr, flush=True)
    print("\nblocks by language and what was done with them:")
    for name, count in sorted(total.items()):
        print(f"{count:5} {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
