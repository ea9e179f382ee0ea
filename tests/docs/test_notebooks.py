"""Every cell of the notebooks runs, and the conditions that they assert hold; with fewer rows than on the site."""

from __future__ import annotations

import pytest

from docs.scripts import notebooks


@pytest.mark.parametrize("path", notebooks.paths(), ids=lambda path: path.stem)
def test_every_cell_runs(path):
    assert notebooks.run(path, quick=True) > 0


def test_an_error_of_a_cell_is_raised(tmp_path):
    from nbclient.exceptions import CellExecutionError
    from nbformat import v4, write

    broken = tmp_path / "broken.ipynb"
    write(v4.new_notebook(cells=[v4.new_code_cell("assert 1 == 2")]), broken)
    with pytest.raises(CellExecutionError, match="assert 1 == 2"):
        notebooks.run(broken)
