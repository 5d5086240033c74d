"""The HTML page: it carries everything itself, and what a user wrote stays text."""

import base64
import math
import random
import re
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from coat_flux.pages.html import LONGEST_SIDE, POLICY, Page, thinned

HOSTILE = '<script src="https://x.invalid/a.js">alert("1")</script> & $x_1$ \'"'


class _Parsed(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page.html())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def sources(self) -> list[str]:
        return [attrs["src"] or "" for tag, attrs in self.tags if tag == "img"]


def _content(source: str) -> bytes:
    return base64.b64decode(source.partition(";base64,")[2])


def full_page(text: str, picture: Path) -> Page:
    """Every part of a page, with the same text everywhere."""
    page = Page(text, text)
    page.heading(text)
    page.paragraph(text)
    page.verdict(text, "bad")
    page.missing(text)
    page.code(text)
    page.table([text], [[text], [None]])
    page.curves(text, {text: [(0, 1.0), (1, 2.0)], "_" + text: [(0, 2.0)]}, y=text)
    page.images(text, [(text, picture), (text, picture.parent / "none.png")])
    with suppress(OSError), page.details(text):
        page.paragraph(text)
        raise OSError
    return page


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(path)
    return path


def test_texts_are_escaped_and_nothing_is_fetched(picture):
    parsed = _Parsed(full_page(HOSTILE, picture))
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"script", "link", "iframe", "a"})
    assert all(source.startswith("data:image/") for source in parsed.sources())
    assert len(parsed.sources()) == 1
    assert parsed.texts.count(HOSTILE) >= 17  # title, heading, texts and cells come back as they were given
    assert [attrs["content"] for tag, attrs in parsed.tags if attrs.get("http-equiv")] == [POLICY]
    plain = full_page("x", picture).html()
    assert "url(" not in plain
    assert "<details><summary>x</summary>\n<p>x</p>\n</details>" in plain  # closed, after an error too


def test_charts_are_inline_and_name_what_they_show():
    page = Page("t")
    page.curves("lr", {"lr": [(0, 0.0), (500, 1e-5), (1000, 2.5e-5)]}, y="lr")
    page.curves("loss", {"each step": [(1, 0.5), (2000, 2.0)]}, y="loss", marks={1200: "lowest at 1200"})
    page.curves("norm", {"a": [(0, 0.002), (1, 300.0)]}, y="norm", log_y=True)
    parsed = _Parsed(page)
    assert parsed.sources() == []
    assert {"0", "200", "1,000", "1e-5", "2e-5", "0.5", "2.0", "lowest at 1200"} <= set(parsed.texts)
    assert {"0.01", "0.1", "1", "10", "100"} <= set(parsed.texts)


@pytest.mark.parametrize("log_y", [False, True])
def test_lines_go_up_where_values_do_and_have_gaps(log_y):
    page = Page("t")
    points = [(0, 1.0), (1, math.nan), (2, 10.0), (3, 0.0 if log_y else math.inf), (4, 100.0)]
    page.curves("c", {"a": points, "empty": []}, y="y", log_y=log_y, band={"a": [(2, 5.0, 20.0), (4, 50.0, 99.0)]})
    (line,) = (attrs["d"] for tag, attrs in _Parsed(page).tags if attrs.get("class") == "line")
    places = [[tuple(map(float, at.split())) for at in part.split("L")] for part in (line or "").split("M")[1:]]
    assert [x for part in places for x, _ in part] == [0, 500, 1000]
    assert len(places) == 3  # two gaps
    heights = [y for part in places for _, y in part]
    assert heights == sorted(heights, reverse=True)  # SVG counts from the top
    assert 0 < heights[-1] < heights[0] < 1000


def test_pictures_small_as_they_are_large_made_small(tmp_path, picture):
    noise = random.Random(0)
    large = tmp_path / "large.png"
    Image.frombytes("RGB", (900, 600), noise.randbytes(900 * 600 * 3)).save(large)
    torn = tmp_path / "torn.png"
    torn.write_bytes(large.read_bytes()[:1000])
    page = Page("t")
    page.images("p", [("a", picture), ("b", large), ("c", torn)], columns=3)
    small, made_small = _Parsed(page).sources()
    assert _content(small) == picture.read_bytes()
    assert made_small.startswith("data:image/jpeg")
    shown = tmp_path / "shown.jpg"
    shown.write_bytes(_content(made_small))
    with Image.open(shown) as image:
        assert image.size == (LONGEST_SIDE, round(LONGEST_SIDE * 600 / 900))
    assert "c: cannot be read" in page.html()


def test_an_empty_chart_says_so_and_thinning_keeps_peaks():
    for values in ([], [(0, math.nan)]):
        page = Page("t")
        page.curves("loss", {"a": values}, y="loss")
        assert "loss: there is nothing to show" in _Parsed(page).texts
        assert "<svg" not in page.html()
    points = [(float(step), math.sin(step / 100)) for step in range(20_000)]
    points[7_777] = (7_777.0, 50.0)
    points[123] = (123.0, math.nan)
    few = thinned(points)
    assert len(few) <= 1_300
    assert (7_777.0, 50.0) in few
    assert [x for x, _ in few] == sorted(x for x, _ in few)
    assert len(thinned(points[:100])) == 100


def test_shaded_cells_are_red_when_low_and_green_when_high():
    page = Page("t")
    page.table(["layer", "c"], [["a", 10.0], ["b", 25.0], ["c", 99.0], ["d", None], ["e", 7]], (10.0, 30.0))
    page.table(["layer", "c"], [["a", 10.0]])
    shades = re.findall(r'<td class="[^"]*" data-label="c"(?: style="background: ([^"]*)")?>([^<]*)<', page.html())
    mixed = "color-mix(in srgb, var(--{}-paper) {}%, var(--paper))"
    papers = [mixed.format("bad", 100), mixed.format("good", 50), mixed.format("good", 100), "", "", ""]
    assert shades == list(zip(papers, ["10.0", "25.0", "99.0", "–", "7", "10.0"], strict=True))
