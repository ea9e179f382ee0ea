"""Promises of the pictures and the page: self-contained, escaped, right on what they show."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from kme_dist.report import page as report
from kme_dist.report.page import Panel, Picture

NASTY = "<script>alert(1)</script> & \"$x_1$\" 'ü'"


def history(n=30, scale=1.0):
    steps = range(1, n + 1)
    return [{"step": s, "objective": scale * 100 / s, "risk": scale * 50 / s, "complexity": 2.0 + s} for s in steps]


def panel(title="after", classes=3):
    grid = np.full((6, 5, classes), 1.0 / classes)
    return Panel(title, grid, np.full((6, 5), 0.5))


def points(classes=3):
    xy = np.random.default_rng(0).uniform(size=(12, 2))
    index = np.arange(12) % classes
    return [(xy[:8], index[:8], False), (xy[8:], index[8:], True)]


PICTURES = {
    "curves": lambda: report.learning_curves({"one": history(), "two": history(scale=3.0)}),
    "confusion": lambda: report.confusion_matrix([[8, 2], [0, 5]], ["cat", NASTY]),
    "reliability": lambda: report.reliability_diagram(
        [{"low": 0.5, "high": 0.6, "rows": 3, "confidence": 0.55, "accuracy": 0.66}]
    ),
    "coverage": lambda: report.risk_coverage_curve(
        [{"coverage": (i + 1) / 40, "risk": i / 100, "entropy": i / 40} for i in range(40)]
    ),
    "image": lambda: report.relevance_images({"a": np.arange(12.0), NASTY: np.ones(12)}, (3, 4)),
    "bars": lambda: report.relevance_bars(np.arange(30.0), [f"feature {i} {NASTY}" for i in range(30)]),
    "gallery": lambda: report.image_gallery(np.zeros((3, 12)), ["a", "b", NASTY], (3, 4)),
    "map": lambda: report.probability_maps(
        [panel("before"), panel()], (0, 1, 0, 1), points(), ["a", "b", NASTY], ("x", "y")
    ),
}


@pytest.fixture(scope="module", params=sorted(PICTURES))
def svg(request):
    return PICTURES[request.param]()


def test_every_picture_is_one_wellformed_svg(svg):
    declared = svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)
    root = ElementTree.fromstring(declared)
    assert root.tag.endswith("svg")
    assert "viewBox" in root.attrib


def test_every_picture_follows_the_theme_of_the_page(svg):
    assert "currentColor" in svg
    assert report.INK not in svg
    assert report.GRID not in svg


def test_no_picture_needs_the_network_or_runs_anything(svg):
    links = re.findall(r'(?:href|src)="([^"]*)"', svg)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "<script" not in svg


def test_pictures_are_the_same_every_time():
    assert PICTURES["map"]() == PICTURES["map"]()


def test_drawing_leaves_no_global_state_behind():
    before = dict(matplotlib.rcParams)
    for draw in PICTURES.values():
        draw()
    assert dict(matplotlib.rcParams) == before


def test_names_inside_pictures_do_not_collide_on_one_page():
    page = report.render_html("x", figures=[Picture(name, draw(), "") for name, draw in PICTURES.items()])
    by_picture = [set(re.findall(r'\bid="([^"]+)"', part)) for part in page.split("<figure")[1:]]
    prefixes = [{name.split("-")[0] for name in names} for names in by_picture]
    assert all(len(prefix) == 1 for prefix in prefixes)


def test_the_confusion_matrix_shows_every_count():
    svg = report.confusion_matrix([[11, 0, 0], [0, 8, 5], [0, 3, 27]], ["a", "b", "c"])
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert [t for t in texts if t in {"11", "8", "5", "3", "27"}] == ["11", "8", "5", "3", "27"]


def test_bars_show_the_strongest_twenty_in_order():
    svg = report.relevance_bars(np.arange(30.0), [f"name{i}" for i in range(30)])
    shown = re.findall(r">name(\d+)<", svg)
    assert shown == [str(i) for i in range(29, 9, -1)]


def test_a_dollar_sign_in_a_name_is_a_dollar_sign():
    assert ">$x_1$ and $x_2$<" in report.relevance_bars(np.ones(2), ["$x_1$ and $x_2$", "b"])


def test_without_complexity_only_the_objective_is_drawn():
    plain = [{**record, "complexity": 0.0} for record in history()]
    assert "complexity r" in report.learning_curves({"one": history(), "two": plain})
    svg = report.learning_curves({"one": plain})
    assert ">objective q<" in svg
    assert "complexity r" not in svg
    assert ">risk<" not in svg


def test_ticks_of_a_log_axis_are_plain_numbers():
    svg = report.learning_curves({"one": history(100)})
    assert "mathdefault" not in svg
    assert ">100<" in svg


def test_an_image_of_relevance_keeps_its_orientation():
    from base64 import b64decode
    from io import BytesIO

    from matplotlib.image import imread

    relevance = np.zeros((4, 4))
    relevance[0, 3] = 1.0  # upper right
    svg = report.relevance_images({"a": relevance.ravel(), "b": np.ones(16)}, (4, 4))
    tag = re.search(r"<image[^>]*>", svg).group()
    pixels = imread(BytesIO(b64decode(re.search(r"base64,([^\"]+)", tag).group(1))))
    if "scale(1 -1)" in tag:
        pixels = pixels[::-1]
    bright = pixels[..., :3].sum(axis=-1)
    row, column = np.unravel_index(bright.argmax(), bright.shape)
    assert row < bright.shape[0] / 4
    assert column >= bright.shape[1] * 3 / 4 - 1


class Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_escapes_whatever_users_name_things():
    page = report.render_html(
        NASTY,
        subtitle=NASTY,
        headline=[(NASTY, NASTY, NASTY)],
        figures=[Picture(NASTY, "<svg></svg>", NASTY)],
        tables=[(NASTY, [NASTY], [[NASTY]])],
        config_text=NASTY,
        footer=NASTY,
    )
    parser = Texts()
    parser.feed(page)
    assert "script" not in parser.tags
    assert sum(NASTY in text for text in parser.texts) == 13  # title twice, everything else once


def test_the_page_stands_alone_and_knows_both_themes():
    page = report.render_html("x", headline=[("a", "b", "c")])
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"https?://", page)
    assert "<link" not in page
    assert "@import" not in page
