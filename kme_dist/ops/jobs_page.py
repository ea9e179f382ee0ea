"""The page `/kme/jobs` of the Dask dashboard: all jobs, to look at, not to change.

    list      state, owner, progress or place in the queue, times, last line of the log; by state, owner and words
    a job     `/kme/jobs?job=ID`: all facts, the end of its log and its result

What it shows comes from the folders of the jobs, under the roots of the jobs that were submitted and of the driver
hosts (under KME_ROOT of the scheduler, if that is set). Where the scheduler cannot read them, its queue is shown.
Folders of jobs that have ended are read once. Text from files is escaped.
"""

from __future__ import annotations

import datetime
import html
import json
import os
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kme_dist.errors import CorruptError, KMEError
from kme_dist.ops.board import duration
from kme_dist.ops.jobs import ENDED, STATES, Job, job_at, job_root
from kme_dist.ops.queue import Entry, job_key, waiting

PATH = "/kme/jobs"
ROWS = 50  # of a page
LINES = 40  # of a log
FRESH_S = 2.0  # how old a list may be
_TAIL_BYTES = 32_768
_OLDEST = datetime.datetime.min.replace(tzinfo=datetime.UTC)


# --- what there is to show ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """All jobs, the newest first, and the roots that could not be read."""

    rows: tuple[dict[str, Any], ...] = ()
    problems: tuple[str, ...] = ()


@dataclass
class JobIndex:
    """The jobs under some roots. Reads the folders again when they may have changed; used from several threads."""

    _known: dict[Path, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    _last: tuple[float, Any, Listing] = (0.0, None, Listing())
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, roots: Iterable[str], queued: Sequence[Entry] = ()) -> Listing:
        """The jobs under these roots, and those of the queue that are not in a folder that can be read here."""
        asked = (tuple(roots), tuple(entry.key for entry in queued))
        with self._lock:
            until, before, listing = self._last
            if before != asked or time.monotonic() >= until:
                listing = self._read(asked[0], queued)
                self._last = (time.monotonic() + FRESH_S, asked, listing)
            return listing

    def _read(self, roots: Sequence[str], queued: Sequence[Entry]) -> Listing:
        found: dict[Path, dict[str, Any]] = {}
        problems = []
        here = [os.environ["KME_ROOT"]] if os.environ.get("KME_ROOT") else roots
        for root in dict.fromkeys(here):
            try:
                found |= self._under(job_root(root))
            except (KMEError, OSError) as error:
                problems.append(f"The scheduler cannot read the jobs under {root} ({error}); its queue is shown.")
        self._known = {path: known for path, known in self._known.items() if path in found}
        rows = list(found.values())
        there = {row["id"] for row in rows}
        places = {entry.key: place for place, entry in enumerate(waiting(queued), 1)}
        for path, row in found.items():
            if row["state"] == "waiting":
                row["place"] = places.get(_key(path))
        rows += [{**_queued(entry), "place": places.get(entry.key)} for entry in queued if entry.id not in there]
        rows.sort(key=lambda row: _time(row["submitted"]), reverse=True)
        return Listing(tuple(rows), tuple(problems))

    def _under(self, root: Path) -> dict[Path, dict[str, Any]]:
        found: dict[Path, dict[str, Any]] = {}
        if not (root / "runs").is_dir():
            return found
        with os.scandir(root / "runs") as entries:
            for entry in entries:
                path = Path(entry.path)
                stamp = _stamp(path)
                if stamp is None:
                    continue
                known = self._known.get(path)
                if known is None or known[0] != stamp or known[1]["state"] not in ENDED:
                    known = (stamp, _status(Job(root, entry.name)))
                    self._known[path] = known
                found[path] = dict(known[1])
        return found


def _key(folder: Path) -> str:
    try:
        return job_key(Job(folder.parent.parent, folder.name))
    except OSError:  # just deleted
        return ""


def _stamp(folder: Path) -> Any:
    """Changes with every event of a job; None if the folder is not that of a job."""
    try:
        (folder / "job.json").stat()
        events = (folder / "events.jsonl").stat()
        return events.st_mtime_ns, events.st_size
    except FileNotFoundError as error:
        return 0 if str(error.filename).endswith("events.jsonl") else None
    except OSError:
        return None


def _status(job: Job) -> dict[str, Any]:
    try:
        found = job_at(job.root, job.id).status()
        if found["state"] not in STATES:
            raise CorruptError(f"{job.folder / 'events.jsonl'} has the unknown state {found['state']!r}")
        return found
    except (KMEError, OSError, KeyError, TypeError, ValueError) as error:  # damaged: it must not hide the others
        row = {"id": job.id, "pipeline": "", "name": "", "state": "damaged", "owner": None, "priority": 0}
        return {**row, "submitted": None, "error": str(error), "folder": str(job.folder)}


def _queued(entry: Entry) -> dict[str, Any]:
    state = "waiting" if entry.host is None else "running"
    facts = {"id": entry.id, "pipeline": "", "name": "", "state": state, "owner": entry.owner}
    return {**facts, "priority": entry.priority, "submitted": entry.submitted, "folder": None}


def last_lines(folder: str | None, most: int) -> list[dict[str, Any]]:
    """The last lines of a job's log, without reading all of it."""
    if folder is None:
        return []
    try:
        with (Path(folder) / "log.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-most:]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # cut at its beginning, or by a kill
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


# --- what a reader asks for --------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """Which jobs, from the address of the page."""

    state: str = ""
    owner: str = ""
    words: str = ""
    page: int = 1
    job: str = ""

    @classmethod
    def of(cls, arguments: Mapping[str, Sequence[bytes]]) -> Wanted:
        def text(name: str) -> str:
            return (arguments.get(name) or [b""])[0].decode("utf-8", "replace")[:120].strip()

        page = text("page")
        return cls(text("state"), text("owner"), text("words"), int(page) if page.isdecimal() else 1, text("job"))

    def address(self, **changes: Any) -> str:
        """Of the page with these changes, relative to itself."""
        wanted = replace(self, **{"page": 1, "job": "", **changes})
        shown = {name: value for name, value in vars(wanted).items() if value and (name, value) != ("page", 1)}
        return html.escape(f"jobs?{urllib.parse.urlencode(shown)}" if shown else "jobs")

    def chosen(self, rows: Iterable[dict[str, Any]], *, any_state: bool = False) -> list[dict[str, Any]]:
        words = self.words.lower().split()
        return [
            row
            for row in rows
            if (any_state or not self.state or row["state"] == self.state)
            and (not self.owner or row["owner"] == self.owner)
            and all(word in f"{row['id']} {row['name']} {row['pipeline']}".lower() for word in words)
        ]


# --- as HTML -----------------------------------------------------------------------------------------


def page(listing: Listing, wanted: Wanted) -> str:
    """The whole page."""
    content = _one_job(listing, wanted) if wanted.job else _list(listing, wanted)
    search = "" if wanted.job else _search(listing, wanted)
    title = wanted.job or "Jobs"
    return (
        f"<!DOCTYPE html><html lang=en><head><meta charset=utf-8><title>{_text(title)} · kme-dist</title>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<style>{_STYLE}</style></head><body><nav><b>kme-dist</b><a href='../kme'>Runs</a>"
        f"<a href='jobs' class=here>Jobs</a><a href='../status'>Dask</a></nav>"
        f"<main>{search}<div id=content>{content}</div></main><script>{_SCRIPT}</script></body></html>"
    )


def _search(listing: Listing, wanted: Wanted) -> str:
    owners = sorted({str(row["owner"]) for row in listing.rows if row["owner"]})
    options = "".join(
        f"<option value='{_text(owner)}'{' selected' if owner == wanted.owner else ''}>{_text(owner)}</option>"
        for owner in owners
    )
    return (
        f"<form method=get action=jobs><input type=search name=words value='{_text(wanted.words)}' "
        "placeholder='Search id, name, pipeline' aria-label=Search>"
        f"<select name=owner aria-label=Owner><option value=''>All owners</option>{options}</select>"
        f"<input type=hidden name=state value='{_text(wanted.state)}'><button>Show</button></form>"
    )


def _list(listing: Listing, wanted: Wanted) -> str:
    counts = Counter(row["state"] for row in wanted.chosen(listing.rows, any_state=True))
    chips = [
        f"<a href='{wanted.address(state='')}' class='chip{'' if wanted.state else ' here'}'>all {counts.total()}</a>"
    ]
    chips += [
        f"<a href='{wanted.address(state=state)}' class='chip {state}{' here' if state == wanted.state else ''}'>"
        f"{state} {counts[state]}</a>"
        for state in (*STATES, "damaged")
        if counts[state]
    ]
    found = wanted.chosen(listing.rows)
    pages = max(1, -(-len(found) // ROWS))
    number = min(max(1, wanted.page), pages)
    shown = found[(number - 1) * ROWS : number * ROWS]
    notes = "".join(f"<p class=note>{_text(problem)}</p>" for problem in listing.problems)
    head = f"{notes}<div class=chips>{''.join(chips)}</div>"
    if not shown:
        return head + _empty(bool(listing.rows))
    names = ("Job", "State", "Owner", "Progress", "Submitted (UTC)", "Time", "Last line of the log")
    rows = "".join(_row(row, wanted) for row in shown)
    table = (
        f"<table><thead><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr></thead><tbody>{rows}</tbody></table>"
    )
    return f"{head}{table}{_pages(wanted, number, pages, len(found))}"


def _empty(others: bool) -> str:
    if others:
        return "<div class=empty><b>No such jobs</b>See <a href=jobs>all jobs</a>.</div>"
    return (
        "<div class=empty><b>No jobs yet</b>Jobs that are submitted to this cluster appear here: "
        "<code>kme-dist submit CONFIG --scheduler ADDRESS</code></div>"
    )


def _pages(wanted: Wanted, number: int, pages: int, count: int) -> str:
    first, last = (number - 1) * ROWS + 1, min(number * ROWS, count)

    def link(name: str, to: int) -> str:
        here = to == number or not 1 <= to <= pages
        return f"<span>{name}</span>" if here else f"<a href='{wanted.address(page=to)}'>{name}</a>"

    links = (link("first", 1), link("earlier", number - 1), link("next", number + 1), link("last", pages))
    return f"<div class=pages><span>{first} to {last} of {count}</span>{''.join(links)}</div>"


def _row(row: Mapping[str, Any], wanted: Wanted) -> str:
    line = last_lines(row.get("folder"), 1)
    stopping = " (stopping)" if row.get("stopping") else ""
    said = row.get("error") or (line[0].get("message", "") if line else "")
    stopping = " (stopping)" if row.get("stopping") else ""
    cells = (
        f"<a href='{wanted.address(job=row['id'])}'>{_text(row['id'])}</a><small>{_text(row['pipeline'])}</small>",
        f"<span class='state {_text(row['state'])}'>{_text(row['state'])}{stopping}</span>",
        _text(row["owner"] or ""),
        _progress(row),
        _moment(row["submitted"]),
        _times(row),
        f"<span class=said title='{_text(said)}'>{_text(said)}</span>",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _progress(row: Mapping[str, Any]) -> str:
    if row.get("place"):
        priority = f", priority {_text(row['priority'])}" if row.get("priority") else ""
        return f"number {row['place']} in the queue{priority}"
    if row["state"] == "waiting":
        return "not in the queue of this scheduler"
    found = row.get("progress")
    if not isinstance(found, Mapping):
        return ""
    done, total = found.get("done"), found.get("total")
    if not total or not isinstance(total, int | float) or not isinstance(done, int | float):
        return _text(found.get("stage", ""))
    share = min(1.0, max(0.0, done / total))
    return (
        f"<span class=bar><i style='width:{100 * share:.0f}%'></i></span>"
        f"<small>{_text(found.get('stage', ''))} {done:,} of {total:,}</small>"
    )


def _one_job(listing: Listing, wanted: Wanted) -> str:
    row = next((row for row in listing.rows if row["id"] == wanted.job), None)
    back = f"<p><a href='{wanted.address()}'>All jobs</a></p>"
    if row is None:
        return f"{back}<div class=empty><b>No job {_text(wanted.job)}</b></div>"
    names = ("name", "pipeline", "owner", "priority", "scheduled", "submitted", "started", "ended", "driver", "drivers",
             "exit_code", "error", "advice", "folder")  # fmt: skip
    facts = "".join(
        f"<tr><th>{name.replace('_', ' ')}</th><td>{_text(row[name])}</td></tr>"
        for name in names
        if row.get(name) not in (None, "")
    )
    lines = "\n".join(
        f"{_text(str(line.get('time', ''))[:19])}  {_text(line.get('level', '')):7}  {_text(line.get('message', ''))}"
        for line in last_lines(row.get("folder"), LINES)
    )
    result = row.get("result")
    shown = (
        {k: v for k, v in result.items() if isinstance(v, str | int | float | bool)} if isinstance(result, dict) else {}
    )
    results = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in shown.items())
    return (
        f"{back}<h1>{_text(row['id'])} <span class='state {_text(row['state'])}'>{_text(row['state'])}</span></h1>"
        f"<p>{_progress(row)}</p>"
        f"<p><a href='../kme?run={urllib.parse.quote(row['id'])}'>Its run on the dashboard</a></p>"
        f"<table class=facts>{facts}</table>"
        f"<h2>Log: the last {LINES} lines (all: <code>kme-dist jobs logs {_text(row['id'])}</code>)</h2>"
        f"<pre>{lines or 'nothing yet'}</pre>"
        + (f"<h2>Result</h2><table class=facts>{results}</table>" if results else "")
    )


def _times(row: Mapping[str, Any]) -> str:
    """How long it ran, or has been waiting."""
    now = datetime.datetime.now(datetime.UTC)
    began = row.get("started") if row["state"] != "waiting" else row["submitted"]
    if not began:
        return ""
    until = _time(row["ended"]) if row.get("ended") else now
    return duration(max(0.0, (until - _time(began)).total_seconds()))


def _time(text: Any) -> datetime.datetime:
    try:
        found = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return _OLDEST
    return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)


def _moment(text: Any) -> str:
    found = _time(text)
    return "" if found == _OLDEST else f"<time>{found.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}</time>"


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #656d76; --paper: #ffffff; --back: #f6f8fa; --edge: #d8dee4;
  --track: #e7ebef; --link: #0969da; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; --busy: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --paper: #151b23; --back: #0d1117;
  --edge: #3d444d; --track: #2a313c; --link: #4493f8; --good: #3fb950; --bad: #f85149; --warn: #d29922;
  --busy: #4493f8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 13px/1.45 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
nav { display: flex; gap: 18px; padding: 10px 18px; background: var(--paper); border-bottom: 1px solid var(--edge); }
nav .here { color: var(--ink); font-weight: 600; }
main { max-width: 1500px; margin: 0 auto; padding: 12px 14px 30px; }
form { display: flex; gap: 8px; margin-bottom: 10px; flex-wrap: wrap; }
input, select, button { font: inherit; color: var(--ink); background: var(--paper); border: 1px solid var(--edge);
  border-radius: 6px; padding: 5px 9px; } input[type=search] { flex: 1 1 240px; max-width: 420px; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 10px; }
.chip { border: 1px solid var(--edge); border-radius: 14px; padding: 2px 10px; background: var(--paper); }
.chip.waiting { color: var(--soft); } .chip.here { border-color: var(--ink); font-weight: 600; }
table { border-collapse: collapse; width: 100%; background: var(--paper); border: 1px solid var(--edge); }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--track); vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: 12px; white-space: nowrap; }
td { overflow-wrap: anywhere; } td:first-child { min-width: 260px; }
td:nth-child(5), td:nth-child(6) { white-space: nowrap; font-variant-numeric: tabular-nums; }
small { display: block; color: var(--soft); font-size: 11px; }
.said { color: var(--soft); display: -webkit-box; -webkit-line-clamp: 2; -webkit-box-orient: vertical;
  overflow: hidden; }
.state { font-weight: 600; white-space: nowrap; color: var(--soft); }
.succeeded { color: var(--good); } .failed, .lost, .damaged { color: var(--bad); }
.running { color: var(--busy); } .retrying, .cancelled { color: var(--warn); }
.bar { display: block; height: 6px; min-width: 120px; border-radius: 3px; background: var(--track); overflow: hidden;
  margin: 6px 0 2px; } .bar i { display: block; height: 100%; background: var(--busy); }
.pages { display: flex; gap: 14px; margin-top: 10px; color: var(--soft); }
.facts { width: auto; } .facts td { white-space: normal; }
h1 { font-size: 18px; margin: 8px 0; overflow-wrap: anywhere; }
h2 { font-size: 13px; color: var(--soft); margin: 16px 0 6px; }
pre { background: var(--paper); border: 1px solid var(--edge); border-radius: 6px; padding: 10px 12px; overflow-x: auto;
  font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
code { background: var(--track); border-radius: 4px; padding: 1px 5px; }
.note { color: var(--warn); } .empty { background: var(--paper); border: 1px dashed var(--edge); border-radius: 8px;
  padding: 26px; text-align: center; color: var(--soft); }
.empty b { display: block; color: var(--ink); font-size: 15px; }
@media (max-width: 900px) { td:nth-child(7), th:nth-child(7), td:nth-child(5), th:nth-child(5) { display: none; } }
@media (max-width: 600px) { td:nth-child(3), th:nth-child(3), td:nth-child(6), th:nth-child(6) { display: none; }
  td:first-child, .bar { min-width: 0; } th, td { padding: 5px 6px; } }
"""
# The list is replaced every few seconds; the search stays as it is, so that nobody is interrupted while typing.
_SCRIPT = """
setInterval(async () => {
  if (document.hidden || String(getSelection())) return;
  try {
    const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), 'text/html');
    const fresh = page.getElementById('content'), shown = document.getElementById('content');
    if (fresh && fresh.innerHTML !== shown.innerHTML) shown.innerHTML = fresh.innerHTML;
  } catch (error) { /* the scheduler is away: what is shown stays */ }
}, 3000);
"""
