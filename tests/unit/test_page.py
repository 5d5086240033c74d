"""The HTML page: it carries everything itself, and what a user wrote stays text."""

from __future__ import annotations

import base64
import math
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from coat_flux.page import Page
from coat_flux.page.charts import thinned
from coat_flux.page.page import POLICY
from coat_flux.page.pictures import LONGEST_SIDE

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


def _full_page(text: str, picture: Path) -> Page:
    page = Page(text, text)
    page.heading(text)
    page.paragraph(text)
    page.missing(text)
    page.code(text)
    page.table([text], [[text], [None]])
    page.curves(text, {text: [(0, 1.0), (1, 2.0)], "_" + text: [(0, 2.0)]}, x=text, y=text)
    page.heat_map(text, [text], [text], [[1.0]], unit=text)
    page.images(text, [(text, picture), (text, picture.parent / "none.png")])
    return page


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(path)
    return path


def test_texts_are_escaped_and_nothing_is_fetched(picture: Path) -> None:
    parsed = _Parsed(_full_page(HOSTILE, picture))
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"script", "link", "iframe", "a"})
    assert all(source.startswith("data:image/") for source in parsed.sources())
    assert len(parsed.sources()) == 2
    assert parsed.texts.count(HOSTILE) >= 9  # title, heading, texts and cells come back as they were given
    policies = [attrs["content"] for tag, attrs in parsed.tags if attrs.get("http-equiv")]
    assert policies == [POLICY]
    assert "url(" not in _full_page("x", picture).html()


def test_a_chart_is_svg_with_its_texts_and_without_references(picture: Path) -> None:
    svg = ElementTree.fromstring(_content(_Parsed(_full_page(HOSTILE, picture)).sources()[0]))
    assert HOSTILE in [node.text for node in svg.iter()]  # dollar signs are no mathematics
    attributes = [(name, value) for node in svg.iter() for name, value in node.attrib.items()]
    addresses = [value for name, value in attributes if name.endswith(("href", "src"))]
    addresses += [found for _, value in attributes for found in re.findall(r"url\((.*?)\)", value)]
    assert addresses
    assert all(address.startswith("#") for address in addresses)


def test_the_same_page_is_the_same_bytes(picture: Path) -> None:
    assert _full_page("a", picture).html() == _full_page("a", picture).html()


@pytest.mark.parametrize("points", [[], [(0, math.nan)], [(1, math.inf)]])
def test_an_empty_chart_says_so(points: list[tuple[float, float]]) -> None:
    page = Page("t")
    page.curves("loss", {"a": points}, x="step", y="loss")
    page.heat_map("map", [], [], [], unit="dB")
    page.images("samples", [])
    parsed = _Parsed(page)
    assert [text for text in parsed.texts if "nothing to show" in text] == [
        "loss: there is nothing to show",
        "map: there is nothing to show",
        "samples: there is nothing to show",
    ]
    assert parsed.sources() == []


def test_gaps_and_logarithms(picture: Path) -> None:
    page = Page("t")
    points = [(0, 1.0), (1, math.nan), (2, 0.0), (3, -1.0), (4, 10.0), (5, 100.0)]
    page.curves(
        "c", {"a": points, "empty": []}, x="x", y="y", log_y=True, band={"a": [(4, 5.0, 20.0), (5, 50.0, 200.0)]}
    )
    assert len(_Parsed(page).sources()) == 1


def test_thinning_keeps_peaks_and_ends() -> None:
    points = [(float(step), math.sin(step / 100)) for step in range(20_000)]
    points[7_777] = (7_777.0, 50.0)
    points[123] = (123.0, math.nan)
    few = thinned(points)
    assert len(few) <= 1_300
    assert (7_777.0, 50.0) in few
    assert [x for x, _ in few] == sorted(x for x, _ in few)
    assert thinned(points[:100]) is not None
    assert len(thinned(points[:100])) == 100


def test_heat_map_colours_low_red_and_high_blue() -> None:
    page = Page("t")
    page.heat_map("m", ["r1", "r2"], ["c1", "c2"], [[10.0, 30.0], [None, math.inf]], unit="dB")
    text = page.html()
    assert '<td style="background: rgb(178 24 43); color: #fff">10</td>' in text
    assert '<td style="background: rgb(33 102 172); color: #fff">30</td>' in text
    assert "<td>–</td><td>inf</td>" in text


def test_pictures_small_as_they_are_large_made_small(tmp_path: Path, picture: Path) -> None:
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


def test_writing_replaces_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "page.html"
    assert Page("one").write(target) == target
    before = target.read_bytes()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        Page("two").write(target)
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]


def test_long_series_are_quick() -> None:
    page = Page("t")
    start = time.perf_counter()
    page.curves("c", {str(i): [(s, s * i) for s in range(50_000)] for i in range(4)}, x="x", y="y")
    assert time.perf_counter() - start < 5
    assert len(page.html()) < 1_000_000


def test_heading_levels() -> None:
    with pytest.raises(ValueError, match="level=1"):
        Page("t").heading("x", 1)
