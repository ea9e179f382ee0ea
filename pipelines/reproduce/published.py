"""The published figures: one YAML file for each table, in configs/paper of the repository.

table = read_table("hnr-table-1")
table.rows["wine"]["GMCE"]          # [97.2, 3.7]: figure and deviation; one number if no deviation was printed
table.note("wine", "CV")            # the sentence that is shown if the cell differs
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kme_dist.config import parse_yaml
from kme_dist.errors import ConfigError

# Beside this module in an installed package, configs/paper in the repository.
FOLDERS = (Path(__file__).parent / "published_figures", Path(__file__).parents[2] / "configs" / "paper")
Figure = Annotated[list[float], Field(max_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Selection(_Strict):
    """Cells by rows and methods; all of them if none is named."""

    rows: list[str] = Field(default_factory=list)
    methods: list[str] = Field(default_factory=list)

    def has(self, row: str, method: str) -> bool:
        return (not self.rows or row in self.rows) and (not self.methods or method in self.methods)


class Note(Selection):
    """A sentence about cells, shown if they differ; `always`: also if they agree, e.g. how settings were chosen."""

    note: str
    always: bool = False


class Quick(_Strict):
    """What `--quick` does: fewer folds, smaller settings, cells left out."""

    folds: Annotated[int, Field(ge=1)]
    settings: dict[str, Any] = Field(default_factory=dict)
    leaves_out: list[Selection] = Field(default_factory=list)
    text: str


class Table(_Strict):
    """A published table or figure, and how it is computed again."""

    title: str
    source: str
    measure: str
    better: Literal["higher", "lower", "same"]
    lower_is_better: list[str] = Field(default_factory=list, description="rows of another measure")
    digits: Annotated[int, Field(ge=0, le=6)]
    protocol: str
    chosen: str = Field(description="on which rows settings were chosen")
    seeds: str
    data: str | None = Field(description="name of the data set; `rows`: of the same name as the row; null: made up")
    claim: str | None = Field(default=None, description="what is published instead of numbers; the bar is the figure")
    comparable: bool = Field(default=True, description="whether data are the published ones")
    folds: Annotated[int, Field(ge=1)]
    settings: dict[str, Any] = Field(default_factory=dict)
    quick: Quick
    methods: list[str]
    rows: dict[str, dict[str, Figure]]
    notes: list[Note] = Field(default_factory=list)

    def data_set(self, row: str) -> str | None:
        return row if self.data == "rows" else self.data

    def better_in(self, row: str) -> str:
        return "lower" if row in self.lower_is_better else self.better

    def notes_of(self, row: str, method: str) -> list[Note]:
        return [note for note in self.notes if note.has(row, method)]

    def is_left_out(self, row: str, method: str) -> bool:
        """Whether `--quick` leaves the cell out."""
        return any(selection.has(row, method) for selection in self.quick.leaves_out)


def table_names() -> list[str]:
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def read_table(name: str) -> Table:
    """The table of this name; ConfigError with all names if there is none."""
    known = table_names()
    if name not in known:
        raise ConfigError(f"unknown table {name}; known: {', '.join(known)}")
    path = _folder() / f"{name}.yaml"
    try:
        return Table.model_validate(parse_yaml(path.read_text(encoding="utf-8"), str(path)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{path}: `{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None


def _folder() -> Path:
    found = next((folder for folder in FOLDERS if folder.is_dir()), None)
    if found is None:
        raise ConfigError(f"the published figures are missing: {FOLDERS[0]} is not a folder; install kme-dist again")
    return found
