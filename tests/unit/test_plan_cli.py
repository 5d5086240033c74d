"""`coat-flux plan`: what it prints, without a network, and what it refuses."""

from __future__ import annotations

import json
import re
import socket

import pytest
import yaml

from coat_flux.cli.entry import main
from coat_flux.plan.facts import CARDS, find_card
from tests.helpers.engine_job import engine_job

DEV = "black-forest-labs/FLUX.1-dev"


@pytest.fixture
def job_file(tmp_path):
    """FLUX.1-dev at 1024 px; captions are encoded while training, so that the text encoders stay on the card."""
    raw = engine_job(
        "my-lora", model=DEV, images=tmp_path / "photos", out=tmp_path, coat={}, network={"linear": 16},
        dataset={"resolution": 1024, "cache_text_embeddings": False},
        train={"disable_sampling": False, "gradient_checkpointing": True}, sample={"width": 1024, "height": 1024},
    )  # fmt: skip
    raw["config"]["process"][0]["device"] = "cuda"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("plan must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_text(job_file, capsys):
    assert main(["plan", str(job_file)]) == 0
    out = capsys.readouterr().out
    assert f"'my-lora' on {DEV}, 11.90 B parameters" in out
    assert "1 x (512 text + 4096 image tokens); LoRA rank 16 on 494 linears" in out
    assert "kept for backward in FP8, fused flow, attention fp8; 0 of 57 blocks recompute" in out
    rows = {line.split("  ")[0]: line.split()[-5:] for line in out.splitlines() if "  " in line}
    assert rows["GB (10^9 bytes) at the peak of"] == ["load", "cache", "sample", "step", "save"]
    assert rows["transformer"] == ["11.97", "-", "11.97", "11.97", "11.97"]
    assert rows["saved activations"] == ["-", "-", "-", "8.98", "-"]
    cards = {line.split(" GB")[0]: line for line in out.splitlines() if line.split(" GB")[0].isdigit()}
    assert list(cards) == ["8", "10", "12", "16", "24", "32", "48", "80", "141"]
    assert "coat.memory.stream_blocks: auto (costs host memory" in cards["12"]
    assert cards["24"].endswith("train.cache_text_embeddings: true (costs nothing)")
    assert cards["80"].split()[:3] == ["80", "GB", "yes"]
    assert "an estimate from below" in out
    assert "at 70% (bf16) and 65% (FP8) of peak rates" in out
    assert "assumed: the images are not here" in out


def test_one_card(job_file, capsys):
    """The phases are then those on this card."""
    assert main(["plan", str(job_file), "--gpu", "28GB"]) == 0
    out = capsys.readouterr().out
    found = re.search(r"(\d+) of 57 blocks recompute", out)
    assert found is not None
    assert 0 < int(found[1]) < 57
    cards = [line for line in out.splitlines() if line.startswith("28 GB")]
    assert len(cards) == 1
    assert cards[0].split()[2] == "yes"
    assert f"{found[1]}/57" in cards[0]
    assert "peak rates" not in out  # of no known GPU


def test_json(job_file, tmp_path, capsys):
    assert main(["plan", str(job_file), "--gpu", "24", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    target = tmp_path / "plan.json"
    assert main(["plan", str(job_file), "--gpu", "24", "--json", str(target)]) == 0
    assert json.loads(target.read_text()) == printed
    phases = printed["phases"]
    assert list(phases) == ["load", "cache", "sample", "step", "save"]
    for parts in phases.values():
        assert parts["total"] == sum(size for part, size in parts.items() if part != "total")
    assert printed["peak"] == max(parts["total"] for parts in phases.values())
    (card,) = printed["cards"]
    assert (card["gb"], card["gpu"], card["fits"]) == (24, "RTX 4090", False)
    assert card["changes"] == [{"write": "train.cache_text_embeddings: true", "costs": "nothing"}]
    assert card["with_changes"]["peak"] < card["peak"]
    assert 0.1 < card["step_seconds"] < 5
    assert set(printed["kept_per_block"]) == {"double", "single"}


def test_without_coat(job_file, capsys):
    raw = yaml.safe_load(job_file.read_text())
    process = raw["config"]["process"][0]
    process["coat"] = {"enabled": False}
    process["train"] |= {"optimizer": "adamw", "gradient_checkpointing": False}
    job_file.write_text(yaml.safe_dump(raw))
    assert main(["plan", str(job_file), "--gpu", "80"]) == 0
    out = capsys.readouterr().out
    assert "kept for backward in high precision; 0 of 57 blocks recompute" in out
    assert "23.80" in out


def test_mistakes_end_as_in_check(job_file, capsys):
    raw = yaml.safe_load(job_file.read_text())
    raw["config"]["process"][0]["coat"] = {"activation": {"atention": "fp8"}}
    job_file.write_text(yaml.safe_dump(raw))
    ends = []
    for command in ("check", "plan"):
        code = main([command, str(job_file)])
        ends.append((code, capsys.readouterr().err))
    assert ends[0] == ends[1]
    assert ends[0][0] == 2
    assert "coat.activation.atention" in ends[0][1]


def test_an_unknown_model_is_refused(job_file, capsys):
    job_file.write_text(job_file.read_text().replace(DEV, "someone/else"))
    assert main(["plan", str(job_file)]) == 2
    assert "model.name_or_path='someone/else': plan downloads nothing" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-3", "big", "nan", "inf", "1e9", "2x4090", "9090", ""])
def test_impossible_cards(job_file, size, capsys):
    assert main(["plan", str(job_file), f"--gpu={size}"]) == 2
    assert f"{size!r}: must be a card's memory in GB, above 0, such as 24" in capsys.readouterr().err


def test_a_json_file_that_cannot_be_written(job_file, tmp_path, capsys):
    target = tmp_path / "nowhere" / "plan.json"
    assert main(["plan", str(job_file), "--gpu", "24", "--json", str(target)]) == 2
    assert f"--json {target}: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "gb", "name"),
    [
        ("24", 24, "RTX 4090"),
        ("24GB", 24, "RTX 4090"),
        ("24 gb", 24, "RTX 4090"),
        ("24 GB VRAM", 24, "RTX 4090"),
        ("28", 28, ""),
        ("4090", 24, "RTX 4090"),
        ("RTX 4090", 24, "RTX 4090"),
        ("rtx4090", 24, "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", 24, "RTX 4090"),
        ("3090", 24, "RTX 3090"),
        ("rtx-5090", 32, "RTX 5090"),
        ("A100", 40, "A100"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100"),
        ("H100", 80, "H100"),
        ("NVIDIA H100 80GB HBM3", 80, "H100"),
        ("RTX 6000 Ada", 48, "6000ADA"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, "4090LAPTOP"),
    ],
)
def test_a_card_is_known_by_its_memory_or_name(text, gb, name):
    card = find_card(text)
    assert (card.gb, card.name) == (gb, name)
    assert bool(card.bf16_tflops) == (name in {known.name for known in CARDS} | {"RTX 3090", "A100"})


def test_a_named_card_is_planned_for(job_file, capsys):
    assert main(["plan", str(job_file), "--gpu", "4090"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("24 GB")]
    assert out.endswith("--gpu 4090: 24 GB, rates of the RTX 4090\n")
