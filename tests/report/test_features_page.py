"""The page on learned features: every example runs as printed, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "features.md"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # what Dask says about ports in use is not the page's concern
def test_examples_of_the_page_run(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S):
        exec(compile(block, str(PAGE), "exec"), space)
    assert space["embedding"].score(space["Xq"], space["yq"]) > 0.8
    assert space["again"].score(space["Xq"], space["yq"]) > 0.8
