"""The documentation agrees with the program. Running every block is `make docs-test`; here is what takes seconds."""

from __future__ import annotations

import importlib
import json
import re

import pytest
import yaml

import kme_dist as kme
from docs.scripts import blocks, links, notebooks, pictures, reference
from kme_dist.config.files import _known_keys

ROOT = blocks.ROOT
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
GENERATED = {f"reference/{name}.md" for name in reference.PAGES} | {"gallery.md", "deploy.md", "changes.md"}
GENERATED |= {f"notebooks/{path.stem}.md" for path in notebooks.paths()}


def block(language, text):
    return blocks.Block("docs/page.md", 1, language, "", text)


@pytest.mark.parametrize("page", blocks.pages())
def test_blocks_are_sound_as_far_as_can_be_seen_without_running_them(page):
    assert [error for found in blocks.blocks_of(page) for error in blocks.static_errors(found)] == []


@pytest.mark.parametrize(
    ("language", "text", "error"),
    [
        ("bash", "kme-dist predct --model m\n", "no such command: predct"),
        ("bash", "X=1 kme-dist predict --modle m | head\n", "--modle"),
        ("bash", "kme-dist jobs stats ID\n", "no such command: stats"),
        ("", "kme-dist learn\n", "config"),
        ("yaml", "learn: {stepps: 3}\n", "stepps"),
        ("yaml", "lern: {steps: 3}\n", "lern"),
        ("python", "clf.fit(X\n", "never closed"),
        ("pyhton", "clf.fit(X)\n", "not tested"),
    ],
)
def test_a_mistake_in_a_block_is_found(language, text, error):
    (found,) = blocks.static_errors(block(language, text))
    assert error in found


def test_right_blocks_of_every_form_are_accepted():
    right = [
        block("bash", "kme-dist ingest a.csv a.zarr --label y > log.txt  # a comment\n"),
        block("sh", "cat > a.yaml << 'CONFIG'\nkme-dist is no command here\nCONFIG\nkme-dist run a.yaml && ls\n"),
        block("", "    kme-dist jobs status ID [--scheduler ADDRESS --tls certs]\n"),
        block("yaml", "model: {kind: cme}\n"),
        block("yaml", "values: {a: 1}\n"),
    ]
    assert [error for found in right for error in blocks.static_errors(found)] == []
    assert [len(list(blocks.commands_of(found))) for found in right[:3]] == [1, 1, 1]


def test_a_failing_page_is_reported_with_its_line(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\n```python\nassert x == 1\nassert x == 2\n```\n")
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    found = blocks.follow("page.md", work)
    assert found["counts"] == {"python: run": 2}
    assert "page.md:8" in found["errors"][0]
    assert "line 9" in found["errors"][0]


def test_what_a_block_requires_is_counted_not_run():
    marked = blocks.Block("docs/page.md", 1, "bash", "docker", "docker build .\n")
    assert blocks.outcome_of(marked) == "requires docker"
    with pytest.raises(ValueError, match=r"```LANGUAGE"):
        blocks.blocks_of_text("docs/page.md", "```bash {.wide}\nls\n```\n")


def test_the_example_of_the_start_page_runs(capsys):
    (example,) = [found for found in blocks.blocks_of("docs/index.md") if found.language == "python"]
    exec(compile(example.text, "docs/index.md", "exec"), {})
    assert float(capsys.readouterr().out.splitlines()[0]) > 0.85


def test_every_page_is_in_the_navigation_once():
    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for value in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(value)]

    listed = leaves(SITE["nav"])
    written = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(written | GENERATED)


def test_every_public_name_is_in_the_reference():
    assert sorted(name for names in reference.SUBJECTS.values() for name in names) == sorted(kme.__all__)
    page = reference.python_page()
    for name in kme.__all__:
        assert f"### kme.{name}\n" in page
    assert "### kme.bayes.sum_rule" in page


def test_every_key_of_a_config_is_in_the_reference():
    page = reference.config_page()
    for key in _known_keys():
        section, _, name = key.rpartition(".")
        assert f"| `{name}` |" in page if section else re.search(rf"(?m)^## {key}\b", page), key


def test_every_command_and_option_is_in_the_reference():
    page = reference.commands_page()
    sections = dict(re.findall(r"(?ms)^## kme-dist ([\w -]+)\n(.*?)(?=^## |\Z)", page))
    found = [(words, command) for words, command in reference.commands() if not hasattr(command, "commands")]
    assert sorted(sections) == sorted(" ".join(words) for words, _ in found)
    for words, command in found:
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else []:
                assert f"`{option}`" in sections[" ".join(words)]


def test_every_function_named_in_how_it_works_exists():
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(kme_dist\.[\w.]+)`", text))
    assert len(names) > 40
    for name in names:
        parts = name.split(".")
        depth = next(i for i in range(len(parts), 1, -1) if _module(".".join(parts[:i])))
        thing = importlib.import_module(".".join(parts[:depth]))
        for part in parts[depth:]:
            thing = getattr(thing, part)
        assert callable(thing), name


def _module(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def test_every_picture_has_a_script_and_is_shown():
    shown = set()
    for page in (ROOT / "docs").rglob("*.md"):
        shown |= set(re.findall(r"pictures/([\w-]+)\.svg", page.read_text(encoding="utf-8")))
    assert shown == set(pictures.names())
    for name in pictures.names():
        module = pictures.script(name)
        assert callable(module.draw)
        assert module.__doc__.endswith(".")


def test_a_picture_has_the_ink_of_each_theme():
    drawn = pictures.render("embedding")
    for suffix, ink in pictures.INKS.items():
        text = drawn[f"embedding{suffix}.svg"].decode()
        assert ink in text
        assert not any(other in text for other in pictures.INKS.values() if other != ink)


@pytest.mark.parametrize("path", notebooks.paths(), ids=lambda path: path.name)
def test_notebooks_are_stored_with_small_outputs_and_without_paths(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < notebooks.LARGEST
    cells = json.loads(text)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) - 2
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    words = "".join(text for cell in code for o in cell["outputs"] for text in o.get("text", []))
    assert not re.search(r"(^|[\s\"'=:])/(tmp|home|root|work|usr|opt|var|Users)/", words)


def test_links_of_the_readme_lead_somewhere():
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists() or target.removeprefix("docs/") in GENERATED, f"{page}: {target}"


def test_a_broken_link_of_the_built_site_is_found(tmp_path):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text('<h1 id="top">Page</h1><img src="missing.svg">')
    (tmp_path / "index.html").write_text(
        '<a href="page/">right</a><a href="page/#top">right</a><a href="page/#nowhere">wrong</a>'
        '<a href="gone/">wrong</a><a href="https://example.org/">elsewhere</a><script src="https://example.org/a.js"></script>'
    )
    wrong, followed, elsewhere = links.problems(tmp_path)
    assert sorted(wrong) == [
        "index.html: gone/ does not exist",
        "index.html: loads https://example.org/a.js from another server",
        "index.html: page/#nowhere has no such anchor",
        "page/index.html: missing.svg does not exist",
    ]
    assert (followed, elsewhere) == (5, {"https://example.org/"})
