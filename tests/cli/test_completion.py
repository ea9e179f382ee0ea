"""Tab completion: commands and options are completed, and the script for a shell is printed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def kme_dist(*arguments, **environment):
    # From bash, which the command then finds as the shell of its user.
    done = subprocess.run(
        ["bash", "-c", '"$0" -m kme_dist "$@" && true', sys.executable, *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("words", "found"), [("kme-dist ins", "inspect"), ("kme-dist inspect --ver", "--verify")])
def test_commands_and_options_are_completed(words, found):
    last = str(len(words.split()) - 1)
    out = kme_dist(_KME_DIST_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last)
    assert out.split() == [found]


def test_completion_is_installed_for_a_shell(tmp_path):
    kme_dist("--install-completion", HOME=str(tmp_path))
    script = (tmp_path / ".bash_completions" / "kme-dist.sh").read_text()
    assert "_KME_DIST_COMPLETE=complete_bash" in script
