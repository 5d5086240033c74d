"""Our pages in a real browser, at the width of a phone and of a desk, light and dark: nothing clipped, all readable."""

import re
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import yaml
from PIL import Image

from coat_flux.cli.entry import main
from coat_flux.pages.live import live_page
from coat_flux.trainers.standalone.session import Session
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.live import LiveRun, read_status
from tests.helpers.browser import WIDTHS, inspect_pages
from tests.helpers.driver import Driver, driven_browser, until
from tests.helpers.engine_job import engine_job
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


# -- the live page of a run that goes on, by mouse --------------------------------------------------------------------
PATIENCE_S = 120


def press(page: Driver, name: str) -> None:
    until(lambda: page.run(f"!document.querySelector('button[name={name}]').disabled"), PATIENCE_S, f"button {name}")
    page.click(f"button[name={name}]")
    until(lambda: page.run("document.getElementById('note').textContent"), PATIENCE_S, "the answer")


def test_a_running_job_is_sampled_saved_and_stopped_by_mouse(place, tmp_path, monkeypatch, capsys):
    config, run = tmp_path / "job.yaml", place["out"] / "seen"
    train = {"steps": 100_000, "disable_sampling": False, "skip_first_sample": True}

    def use(page: Driver, session: Session) -> None:
        if session.step == 1:
            address, token = re.search(r"watch: (http://127\.0\.0\.1:\d+/)#(\S{32})", capsys.readouterr().out).groups()
            page.open(address)  # without the token
            assert "step 1 of" in page.run("document.querySelector('.verdict').textContent")
            assert page.run("[...document.querySelectorAll('button')].every(button => button.disabled)")
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(address + "commands/stop", method="POST"), timeout=30)
            page.open(f"{address}#{token}")
            press(page, "sample")
            assert not (run / "samples").exists()
        elif session.step == 2:
            press(page, "save")
        elif session.step == 4:
            look = "[...document.images].some(image => image.naturalWidth > 0)"
            until(lambda: page.run(look), PATIENCE_S, "the sample")
            assert [path.name for path in run.glob("*.safetensors")] == ["seen_000000003.safetensors"]
            press(page, "stop")

    job = engine_job("seen", **place, train=train, save={"save_every": 10**6}, sample={"sample_every": 10**6})
    config.write_text(yaml.safe_dump(job), encoding="utf-8")
    with driven_browser(tmp_path / "browser") as page:
        watched = partial(COATTrainer, observer=partial(use, page))
        monkeypatch.setattr("coat_flux.trainers.standalone.trainer.COATTrainer", watched)
        assert main(["train", str(config), "--watch", "--port", "0"]) == 130
        until(lambda: "Stopped" in page.run("document.querySelector('.verdict').textContent"), PATIENCE_S, "the end")
    assert "Stopped after step 5" in capsys.readouterr().out
    assert read_status(run)["ended"] == "stopped"
    assert not (run / "coat" / "commands").exists()
    assert len(list((run / "samples").iterdir())) == 1
