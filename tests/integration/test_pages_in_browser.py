"""Our pages in a real browser, at the width of a phone and of a desk, light and dark: nothing clipped, all readable."""

from pathlib import Path

import pytest
from PIL import Image

from coat_flux.pages.live import live_page
from coat_flux.watch.live import LiveRun
from tests.helpers.browser import WIDTHS, inspect_pages
from tests.unit.test_live import make_watched_run
from tests.unit.test_page import full_page

LOSSLESS_PAGE = Path(__file__).parents[2] / "docs" / "lossless.html"


def parts(picture: Path) -> str:
    """Every part that a page may have, with long words."""
    long = "transformer_blocks.11." + "attn.to_added_projection." * 4
    page = full_page("a text " + long, picture)
    for tone in ("good", "bad", "open", "plain"):
        page.verdict(f"What came out: {tone}.", tone)  # type: ignore[arg-type]  # every tone in turn
    with page.details("folded"):
        page.table([f"column {i}" for i in range(9)], [[long, *map(str, range(8))]] * 2)
        shades = [[i + 5.5 * j for i in range(6)] for j in range(5)]
        page.table(["layer", *(f"exp_avg{i}" for i in range(6))], [[long, *row] for row in shades], (0.0, 27.0))
        page.code(f"key: {long}")
    page.curves("c", {f"s{i}": [(step, step * i) for step in range(0, 90_000, 100)] for i in range(8)}, y="y")
    marks = {0: "first mark", 1e6: "last mark"}
    page.curves("m", {"a": [(0, 1e-7), (1e6, 1e7)]}, y="y", log_y=True, marks=marks)
    page.images("many", [(f"step {i}", picture) for i in range(8)], columns=8)
    page.images("pairs", [("seed 1", picture), ("", picture)], columns=2, header=["bf16", "COAT"])
    return page.html()


def watched(folder: Path) -> str:
    """The live page of a run that goes on."""
    run = make_watched_run(folder / "a_rather_long_name_that_has_to_break_somewhere" / "shirt")
    with LiveRun(run, 0, 100, samples=True):
        return live_page(run, "nonce")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    Image.new("RGB", (8, 8), "red").save(folder / "a.png")
    return {
        "parts": parts(folder / "a.png"),
        "watch": watched(folder / "watch"),
        "lossless": LOSSLESS_PAGE.read_text(encoding="utf-8"),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_their_window_and_can_be_read(scheme, pages, tmp_path):
    layouts = inspect_pages(pages, scheme, tmp_path / "browser")
    assert set(layouts) == {f"{name} {width}" for name in pages for width in WIDTHS}
    for name, layout in layouts.items():
        assert layout["dark"] == (scheme == "dark"), name
        assert layout["texts"] > 20, name
        assert layout["wrong"] == [], name
