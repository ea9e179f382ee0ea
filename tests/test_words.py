"""The plain English of the field: phrases that a reader would stumble over do not come back. See docs/glossary.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Where to look: folders and files.
ROOMS = ["kme_dist", "pipelines", "configs", "benchmarks", "deploy", "docs", "README.md", "CHANGELOG.md"]
# What was found, as a regular expression, and what to write instead.
PHRASES = {
    r"(go|goes|going|gone|went) on (with|where|from)": "resume",
    r"(stand|stands|stood|standing) still": "stalled",
    r"needs? a whole number": "must be an integer >= ...",
    r"is no name of": "invalid ...: use ...",
    r"sign between the fields": "field delimiter",
    r"so many most probable": "number of top classes",
    r"nothing of kme-dist lies": "not a kme-dist data set, model or run",
    r"lies? (here|there)\b": "path exists and is not ...",
    r"\bwas not there before\b": "is unknown; known: ...",
    r"\b(is|are) cut short\b": "truncated",
    r"\bgets? in the way\b": "problem",
    r"\brounds? otherwise\b": "rounds differently",
    r"\bspelled out\b": "with all defaults",
    r"\b(opened|taken|drawn|stored|written) anew\b": "again, recomputed",
    r"\bfewer than asked\b|\bthan asked for\b|\bwhen asked for\b": "than requested, on request",
    r"\bwhat was asked for\b": "the request",
    r"\b(does|do|goes?) not go (with|together)\b": "is not supported with, incompatible",
    r"\b(led_by|count_by|_in_the_way|_lies_by_columns|Judgement)\b": "with_argmax, register, HeldOutObjective, ...",
    r"stops? to be valid": "expires",
    r"certificates? (that )?ends?\b": "expires",
    r"\bset aside": "skipped chunk ... (quarantined)",
    r"in training and test alike": "in both the training and the test set",
    r"when whom a kill hits": "a kill at any moment is safe",
    r"the surroundings fail": "infrastructure failure, retry",
    r"if it may abstain": "error rate when uncertain rows are skipped",
    r"(steps make|made|makes) small\b": "the quantity minimised",
    r"\btoo (modest|sure)\b": "underconfident, overconfident",
    r"\b(begun|begins?|started?|made|makes?|computed?|done|does|solved?) (\w+ )?anew\b": "restarted, recomputed",
    r"\bfrom scratch\b": "restarted, recomputed",
    r"\bmade again\b": "recomputed",
    r"columns and categories then hold": "so that its encoding is reused",
    r"\b(told_work|travelling|_talker|count_no_more)\b": "run_stage, without_schedule, stderr_printer, unregister",
    r"\bdef (judge|alone)\b|\bclass Play\b": "evaluate, solo_threads, RoundFn",
    r"\b(play_round|PlayRound|_travelling|reads_apart)\b": "run_round, RoundFn, without_schedule, has_readers",
    r"\bjudg(e|es|ed|ing)\b": "evaluate",
    r"\b(was|were|is|are) asked for\b": "requested",
    r"\b(was|were) (not )?at hand\b": "available",
    r"\b(and|or) \w+( \w+)? alike\b": "both ... and ...",
    r"\bchosen? again\b": "retune",
    r"\b(lies?|lay) (in|beside|where) (the|a|it|them)\b": "is in, is stored in",
    r"\bscratch place\b": "scratch folder",
    r"\bcomes? home\b": "is returned",
    r"\bpassed over\b": "skipped",
    r"\bwhere nobody says\b": "default",
    r"\bso many (rows|steps|times|centres)\b": "this many, number of",
}
TEXT = {".py", ".md", ".yaml", ".yml", ".json", ".service", ".timer", ".sbatch", ""}
SKIPPED = {"CHANGELOG.md", "glossary.md"}  # history, and the page that lists the words not to use


def texts():
    for room in ROOMS:
        path = ROOT / room
        assert path.exists(), room
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and file.suffix in TEXT and file.name not in SKIPPED and "__pycache__" not in file.parts:
                yield file


def found_in(text):
    """Lines with such a phrase, also where it is broken over two lines of prose or of a string."""
    joined = re.sub(r'"?\s*\n\s*(f?"|#|\*|-)?\s*', lambda match: " " * len(match.group()), text)
    joined = re.sub(r" +", " ", joined)
    return [
        (match.group(), instead)
        for phrase, instead in PHRASES.items()
        for match in re.finditer(phrase, joined, re.IGNORECASE)
    ]


@pytest.mark.parametrize("file", list(texts()), ids=lambda file: str(file.relative_to(ROOT)))
def test_words_are_those_of_the_field(file):
    found = found_in(file.read_text(encoding="utf-8"))
    assert not found, "; ".join(f"{phrase!r}: write {instead!r}" for phrase, instead in found)


def test_a_phrase_would_be_found_also_across_lines():
    assert found_in("the job goes on\nwith its checkpoint")
    assert found_in('f"the certificate of the scheduler is made "\n    f"anew"')
    assert found_in("# It stands\n# still.")
    assert not found_in("certs --from-scratch; it resumes. The certificate expires.")


def test_the_glossary_has_one_row_for_one_word():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [word.strip() for row in rows for word in row.split(",") if row != "word"]
    assert len(words) == len(set(words))
    wanted = "data set, chunk, batch, split, round, step, candidate, recipe, executor, worker, driver, job, "
    wanted += "run folder, stage, checkpoint, model, centre, embedding, quarantined, lease, resume, expired, stalled"
    assert set(wanted.split(", ")) <= set(words)
