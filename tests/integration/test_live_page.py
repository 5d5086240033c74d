"""`coat-flux train --watch`, its page in a headless browser: sample, save and stop by mouse."""

import re
import urllib.error
import urllib.request
from functools import partial

import pytest
import yaml

from coat_flux.cli.entry import main
from coat_flux.trainers.standalone.session import Session
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.live import read_status
from tests.helpers.driver import Driver, driven_browser, until
from tests.helpers.engine_job import engine_job

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
