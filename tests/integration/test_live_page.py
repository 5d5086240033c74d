"""`coat-flux train --watch` in a process of its own, its page in a headless browser: sample, save and stop by mouse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from coat_flux.watch.live import read_status
from tests.helpers.driver import Driver, driven_browser, until
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.tiny_flux import make_tiny_flux

PATIENCE_S = 120


def press(page: Driver, name: str) -> None:
    until(lambda: page.run(f"!document.querySelector('button[name={name}]').disabled"), PATIENCE_S, f"button {name}")
    page.click(f"button[name={name}]")


def sentence(page: Driver) -> str:
    return page.run("(document.querySelector('.verdict') || document.body).textContent")


def test_a_running_job_is_sampled_saved_and_stopped_by_mouse(tmp_path: Path) -> None:
    job = engine_job(
        "seen",
        model=make_tiny_flux(tmp_path / "tiny"),
        images=write_images(tmp_path / "images", 3),
        out=tmp_path / "out",
        train={"steps": 100_000, "disable_sampling": False, "skip_first_sample": True},
        save={"save_every": 100_000},
        sample={"sample_every": 100_000},
    )
    config, run = tmp_path / "job.yaml", tmp_path / "out" / "seen"
    config.write_text(yaml.safe_dump(job), encoding="utf-8")
    with driven_browser(tmp_path / "browser") as page, (tmp_path / "said.txt").open("w+", encoding="utf-8") as said:
        command = [sys.executable, "-m", "coat_flux.cli", "train", str(config), "--watch", "--port", "0"]
        training = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            found = until(
                lambda: re.search(r"watch: (http://127\.0\.0\.1:\d+/)#(\S{32})", (tmp_path / "said.txt").read_text()),
                PATIENCE_S,
                "the address",
            )
            page.open(found[1])  # without the token
            until(lambda: re.search(r"step [1-9]", sentence(page)), PATIENCE_S, "a step")
            assert page.run("[...document.querySelectorAll('button')].every(button => button.disabled)")
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(found[1] + "commands/stop", method="POST"), timeout=30)
            assert not (run / "samples").exists()

            page.open(f"{found[1]}#{found[2]}")
            press(page, "sample")
            until(
                lambda: page.run("[...document.images].some(image => image.naturalWidth > 0)"), PATIENCE_S, "a sample"
            )
            press(page, "save")
            until(lambda: list(run.glob("seen_*.safetensors")), PATIENCE_S, "a checkpoint")
            assert training.poll() is None
            press(page, "stop")
            assert training.wait(timeout=PATIENCE_S) == 130
            until(lambda: "has ended" in page.run("document.getElementById('note').textContent"), PATIENCE_S, "the end")
        finally:
            training.kill()
            training.wait()
        assert "Stopped after step" in (tmp_path / "said.txt").read_text(encoding="utf-8")
    assert read_status(run).ended == "stopped"
    assert not (run / "coat" / "commands").exists()
    assert len(list((run / "samples").iterdir())) == 1
