"""`coat-flux doctor`: what it says of good and bad machines; the probes' inputs are made up here."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from coat_flux.cli.machine import add_parsers
from coat_flux.doctor import PROBES, absent, ai_toolkit, bad, diagnose, good, gpu, system, verdict
from tests.helpers.aitk_standin.host import PACKAGE, copy_checkout


def texts(lines):
    return [str(line) for line in lines]


def doctor(*arguments):
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    args = parser.parse_args(["doctor", *map(str, arguments)])
    return args.run(args)


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "driver_names", list)


# --- lines, verdict, isolation, command


@pytest.mark.parametrize(
    ("lines", "works", "text"),
    [
        ([good("GPU 0", "x")], True, "training works here"),
        ([bad("GPU 0", "busy", "end it"), bad("disk", "full", "free")], True, "training works here"),
        ([absent("GPU", "none")], True, "training works here on the CPU only"),
        ([good("GPU 0", "x"), bad("peft", "old", "update", stops=True)], False, "cannot work here yet: see peft"),
    ],
)
def test_the_verdict(lines, works, text):
    found = verdict(lines)
    assert found[0] is works
    assert text in found[1]


@pytest.mark.parametrize("error", [RuntimeError("driver\n  broke"), OSError(5, "I/O"), SystemError(), KeyError("x")])
def test_a_probe_that_fails_is_a_line_and_the_others_go_on(monkeypatch, no_card, error):
    def probe():
        yield good("memory", "first")
        raise error

    monkeypatch.setattr(system, "memory", probe)
    monkeypatch.setattr("coat_flux.doctor.PROBES", [one for one in PROBES if one[0] in ("memory", "disk")])
    lines = texts(diagnose())
    at = lines.index("✓ memory: first")
    assert lines[at + 1].startswith(f"✗ memory: could not be checked ({type(error).__name__}: ")
    assert "\n" not in lines[at + 1]
    assert any(line.startswith(("✓ disk here", "✗ disk here")) for line in lines[at + 2 :])


@pytest.mark.parametrize(("place", "stops"), [("gpu.cards", True), ("gpu.fp8_gemms", False)])
def test_what_cannot_be_checked_stops_only_where_it_is_needed(monkeypatch, no_card, place, stops):
    def probe():
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(f"coat_flux.doctor.{place}", probe)
    monkeypatch.setattr("coat_flux.doctor.PROBES", [one for one in PROBES if one[1] in ("system.python", place)])
    lines = list(diagnose())
    assert sum("CUDA error: unknown error" in line.text for line in lines) == 1
    assert any(line.stops for line in lines) is stops


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✓"), ("cp1252", "+"), ("ascii", "+")])
def test_the_command_prints_on_any_console(monkeypatch, tmp_path, encoding, mark):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert doctor() == 0
    shown = out.buffer.getvalue().decode(encoding).splitlines()
    assert shown[0].startswith(f"{mark} Python: 3.")
    assert shown[-2].startswith("- ai-toolkit: not here; `coat-flux train` does not need it")
    assert shown[-1].startswith("training works here on the CPU only")


@pytest.mark.usefixtures("no_card")
def test_the_command_ends_with_1_where_something_needed_is_broken(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert doctor() == 1
    assert "see Python" in capsys.readouterr().out.splitlines()[-1]


# --- software


def test_a_torch_for_the_cpu_beside_a_gpu_stops(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(gpu, "driver_names", lambda: ["NVIDIA L40S, driver 580.65"])
    (line,) = system.torch_build()
    assert line.stops
    assert "torch==2.13.0 --index-url" in line.remedy
    monkeypatch.setattr(gpu, "driver_names", list)
    assert [line.mark for line in system.torch_build()] == ["✓"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert [line.mark for line in system.torch_build()] == ["✓"]


def test_a_torch_that_does_not_load_stops(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (line,) = system.torch_build()
    assert line.stops
    assert "cannot be imported" in line.text


def test_versions_are_held_against_the_bounds_of_setup(monkeypatch):
    have = {"diffusers": "0.35.1", "transformers": "5.0.0.dev0", "safetensors": "0.5"}

    def version(name):
        if name not in have:
            raise importlib.metadata.PackageNotFoundError(name)
        return have[name]

    wanted = ["torch>=2.9", "diffusers>=0.36", "transformers>=4.57", "peft>=0.17", "safetensors>=0.5"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [*wanted, 'pytest>=8; extra == "test"'])
    monkeypatch.setattr(importlib.metadata, "version", version)
    lines = list(system.packages())
    assert texts(lines) == [
        "✗ diffusers: 0.35.1: must be >=0.36 -> pip install 'diffusers>=0.36'",
        "✗ peft: not installed -> pip install 'peft>=0.17'",
        "✓ packages: diffusers 0.35.1, transformers 5.0.0.dev0, safetensors 0.5; 4 checked",
    ]
    assert [line.stops for line in lines] == [True, True, False]


def test_the_bounds_are_those_of_setup():
    setup = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    found = [f"{one.name}{one.specifier}" for one in system.requirements()]
    assert all(f'"{line}"' in setup or f'"{line}; python_version' in setup for line in found)
    assert len({line.split(">")[0] for line in found}) == len(found)
    assert {line.split(">")[0] for line in found} >= set(system.SHOWN)
    assert not any(line.startswith(("torch", "pytest")) for line in found)


# --- machine


def test_memory_of_a_container_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100e9, total=256e9))
    assert texts(system.memory()) == ["✓ memory: 100.0 of 256.0 GB RAM free"]
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 3000000000\n")
    assert texts(system.memory()) == ["✓ memory: 100.0 of 256.0 GB RAM free"]
    (tmp_path / "memory.max").write_text("12000000000\n")
    (line,) = system.memory()
    assert line.text == "10.0 of 12.0 GB RAM free (the container's limit)"
    assert line.remedy.startswith("FLUX.1 takes about 13 GB")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The model cache, with one shard of the transformer missing."""
    monkeypatch.setattr(system, "_cache_folder", lambda: tmp_path / "hub")
    monkeypatch.setattr(system, "_has_token", lambda: False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    snapshot = tmp_path / "hub" / "models--black-forest-labs--FLUX.1-dev" / "snapshots" / "0a1b"
    for folder in ("transformer", "vae"):
        (snapshot / folder).mkdir(parents=True)
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors", "c": "part-1.safetensors"}}
    index_file = snapshot / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index_file.write_text(json.dumps(index))
    for name in ("model_index.json", "vae/config.json", "transformer/part-1.safetensors"):
        (snapshot / name).write_text("{}")
    return snapshot


def test_the_model_in_the_cache(cache):
    (line,) = system.model()
    assert line.text == "torn download, transformer/part-2.safetensors is missing"
    assert line.remedy == "hf download black-forest-labs/FLUX.1-dev"
    (cache / "transformer" / "part-2.safetensors").write_text("")
    assert texts(system.model()) == [f"✓ FLUX.1-dev: in the cache: {cache}"]


def test_the_model_is_not_in_the_cache(cache, monkeypatch):
    monkeypatch.setattr(system, "_snapshot", lambda: None)
    (line,) = system.model()
    assert line.text.endswith("the first run downloads 34 GB, and there is no Hugging Face token")
    assert "`hf auth login`" in line.remedy
    monkeypatch.setattr(system, "_has_token", lambda: True)
    assert texts(system.model())[0].startswith("- FLUX.1-dev: not in the cache, the first run downloads 34 GB; a token")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert texts(system.model())[0].startswith("✗ FLUX.1-dev: not in the cache, and HF_HUB_OFFLINE forbids downloads")


def test_disk(cache, monkeypatch):
    free = {"here": 50e9, "cache": 20e9}
    monkeypatch.setattr(
        system.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=free["cache" if "hub" in str(path) else "here"]),
    )
    here, there = system.disk()
    assert str(here) == f"✓ disk here: 50.0 GB free in {Path.cwd()}"
    assert there.remedy == "FLUX.1-dev takes 34 GB: free that, or set HF_HOME to another folder"
    (cache / "transformer" / "part-2.safetensors").write_text("")
    free["here"] = 1e9
    here, there = system.disk()
    assert here.remedy == "a run writes about 3 GB: free that, or train in another folder"
    assert there.mark == "✓"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [line.remedy.split()[0] for line in system.disk()] == ["train", "set"]


# --- ai-toolkit


@pytest.fixture
def checkout(tmp_path):
    return copy_checkout(tmp_path / "ait")


def test_a_checkout_and_our_link_in_it(checkout):
    version, extension = texts(ai_toolkit.checkout(checkout))
    assert version == f"✓ ai-toolkit: 0.12.26 in {checkout}"
    assert extension == f"- extension: not in that checkout; `coat-flux install {checkout}` links it"
    link = checkout / "extensions" / "coat_flux"
    link.symlink_to(PACKAGE, target_is_directory=True)
    assert texts(ai_toolkit.checkout(checkout))[1] == f"✓ extension: extensions/coat_flux leads to {PACKAGE}"
    link.unlink()
    link.mkdir()
    assert texts(ai_toolkit.checkout(checkout))[1].startswith("✗ extension")


def test_an_untested_version(checkout):
    (checkout / "version.py").write_text('VERSION = "0.9.1"\nraise SystemExit(3)\n')
    version, _ = ai_toolkit.checkout(checkout)
    assert version.text == f"0.9.1 in {checkout} is not tested with COAT-FLUX"


def test_where_it_is_looked_for(checkout, monkeypatch, tmp_path):
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert next(ai_toolkit.checkout(None)).mark == "-"
    monkeypatch.chdir(checkout)
    assert next(ai_toolkit.checkout(None)).text == f"0.12.26 in {checkout}"
    monkeypatch.setenv("AI_TOOLKIT_ROOT", str(tmp_path))
    line = next(ai_toolkit.checkout(None))
    assert line.stops
    assert line.text == f"{tmp_path} is not a checkout of it: no run.py, toolkit/extension.py, extensions"
    assert next(ai_toolkit.checkout(checkout)).mark == "✓"
