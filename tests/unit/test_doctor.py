"""`coat-flux doctor`: what it says of good and bad machines and GPUs; the probes' inputs are made up here."""

import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from coat_core.ops import dispatch
from coat_flux.base import environment
from coat_flux.blocks.held import room_of, usable_bytes
from coat_flux.cli.entry import main
from coat_flux.doctor import on_gpu, probes
from coat_flux.doctor.probes import BAD, GOOD, Line, ai_toolkit, diagnose, verdict
from coat_flux.mini_flux import MINI_FLUX
from tests.helpers.aitk_standin.host import PACKAGE, copy_checkout
from tests.helpers.operators import as_on_cuda


def have_packages(monkeypatch, versions):
    """Let these packages be installed and no others; the dictionary may be changed later."""

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(probes, "driver_names", list)


@pytest.fixture
def card(monkeypatch):
    """A GPU as torch would report it; its fields may be changed."""
    card = SimpleNamespace(name="NVIDIA L40S", capability=(8, 9), free=47.4e9, total=48e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card.capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card.free, card.total))
    monkeypatch.setattr(probes, "driver_names", lambda: [f"{card.name}, driver 580.65"])
    return card


def test_what_stops_is_in_the_verdict():
    busy, old = Line(BAD, "GPU 0", "busy", "end it"), Line(BAD, "peft", "old", "update", stops=True)
    assert verdict([busy]) == (True, "training works here")
    works, text = verdict([busy, old])
    assert (works, "see peft" in text) == (False, True)


def test_a_probe_that_fails_is_a_line_and_the_others_go_on(monkeypatch):
    def probe():
        yield Line(GOOD, "GPU", "first")
        raise SystemError("driver\n  broke")

    monkeypatch.setattr(probes, "PROBES", (("GPU", probe), ("FP8", probe)))
    lines = list(diagnose())
    assert [(line.mark, line.subject, line.stops) for line in lines[1:4:2]] == [("✗", "GPU", True), ("✗", "FP8", False)]
    assert "SystemError: driver broke" in lines[1].text


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize(("encoding", "mark", "version"), [("utf-8", "✓", (3, 12, 1)), ("ascii", "x", (3, 9, 1))])
def test_the_command_prints_on_any_console_and_ends_with_1_where_training_cannot_work(
    monkeypatch, tmp_path, encoding, mark, version
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    monkeypatch.setattr(sys, "version_info", version)
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["doctor"]) == (mark == "x")
    shown = out.buffer.getvalue().decode(encoding).splitlines()
    assert shown[0].startswith(f"{mark} Python: 3.")
    assert shown[-2].startswith("- ai-toolkit: not here")
    assert shown[-1].startswith("training works here on the CPU only") or "see Python" in shown[-1]


@pytest.mark.parametrize(
    ("cuda", "names", "stops"),
    [(None, ["NVIDIA L40S, driver 580.65"], True), (None, [], False), ("13.0", ["NVIDIA L40S, driver 580.65"], False)],
)
def test_a_torch_for_the_cpu_beside_a_gpu_stops(monkeypatch, cuda, names, stops):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(probes, "driver_names", lambda: names)
    (line,) = probes.torch_build()
    assert (line.mark, line.stops) == ("✗" if stops else "✓", stops)
    assert ("torch==2.13.0 --index-url" in line.remedy) is stops
    monkeypatch.setitem(sys.modules, "torch", None)
    (line,) = probes.torch_build()
    assert line.stops
    assert "cannot be imported" in line.text


def test_versions_are_held_against_the_bounds_of_setup(monkeypatch):
    wanted = ["torch>=2.9", "diffusers>=0.36", "transformers>=4.57", "peft>=0.17", "safetensors>=0.5"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [*wanted, 'pytest>=8; extra == "test"'])
    have_packages(monkeypatch, {"diffusers": "0.35.1", "transformers": "5.0.0.dev0", "safetensors": "0.5"})
    old, missing, rest = probes.packages()
    assert [line.stops for line in (old, missing, rest)] == [True, True, False]
    assert (old.subject, "'diffusers>=0.36'" in old.remedy) == ("diffusers", True)
    assert (missing.subject, "'peft>=0.17'" in missing.remedy) == ("peft", True)
    assert "transformers 5.0.0.dev0, safetensors 0.5; 4 checked" in rest.text


@pytest.mark.parametrize(
    ("limit", "free", "total", "mark"),
    [(None, 100, 256, "✓"), ("max", 100, 256, "✓"), ("12000000000", 10, 12, "✗"), ("200000000000", 100, 200, "✓")],
)
def test_memory_of_a_container_counts(monkeypatch, tmp_path, limit, free, total, mark):
    monkeypatch.setattr(probes, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100e9, total=256e9))
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("5000000000\n")
        (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 3000000000\n")
    (line,) = probes.memory()
    assert line.text.startswith(f"{free}.0 of {total}.0 GB")
    assert (line.mark, "13 GB" in line.remedy) == (mark, mark == "✗")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The model cache, with one part missing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    snapshot = tmp_path / "hub" / "models--black-forest-labs--FLUX.1-dev" / "snapshots" / "0a1b"
    shutil.copytree(MINI_FLUX, snapshot)
    (snapshot / "vae").rename(tmp_path / "vae")
    return snapshot


def test_the_model_is_whole_in_the_cache_or_can_be_downloaded(cache, tmp_path, monkeypatch):
    (line,) = probes.model()
    assert (line.mark, "has no vae/" in line.text) == ("✗", True)
    (tmp_path / "vae").rename(cache / "vae")
    assert [str(line) for line in probes.model()] == [f"✓ FLUX.1-dev: in the cache: {cache}"]
    cache.rename(cache.parents[1] / "elsewhere")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    for token, mark, word in ((None, "✗", "hf auth login"), ("x", "-", "34 GB; a token")):
        monkeypatch.setattr("huggingface_hub.get_token", lambda token=token: token)
        (line,) = probes.model()
        assert (line.mark, word in str(line)) == (mark, True)


def test_disk(cache, tmp_path, monkeypatch):
    free = {"here": 50e9, "cache": 20e9}
    usage = lambda path: SimpleNamespace(free=free["cache" if "hub" in str(path) else "here"])  # noqa: E731
    monkeypatch.setattr(probes.shutil, "disk_usage", usage)
    here, there = probes.disk()
    assert (here.mark, there.mark) == ("✓", "✗")
    assert ("34 GB" in there.remedy, "HF_HOME" in there.remedy) == (True, True)
    (tmp_path / "vae").rename(cache / "vae")
    free["here"] = 1e9
    assert [line.mark for line in probes.disk()] == ["✗", "✓"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [line.mark for line in probes.disk()] == ["✗", "✗"]


def test_a_checkout_and_our_link_in_it(tmp_path, monkeypatch):
    checkout = copy_checkout(tmp_path / "ait")
    version, extension = ai_toolkit(checkout)
    assert str(version) == f"✓ ai-toolkit: 0.12.26 in {checkout}"
    assert (extension.mark, "coat-flux install" in extension.text) == ("-", True)
    link = checkout / "extensions" / "coat_flux"
    link.symlink_to(PACKAGE, target_is_directory=True)
    assert [line.mark for line in ai_toolkit(checkout)] == ["✓", "✓"]
    link.unlink()
    link.mkdir()
    (checkout / "version.py").write_text('VERSION = "0.9.1"\nraise SystemExit(3)\n')
    assert [line.mark for line in ai_toolkit(checkout)] == ["✗", "✗"]
    monkeypatch.setenv("AI_TOOLKIT_ROOT", str(tmp_path))
    line = next(ai_toolkit(None))
    assert (line.stops, "no run.py, toolkit/extension.py, extensions" in line.text) == (True, True)
    monkeypatch.delenv("AI_TOOLKIT_ROOT")
    monkeypatch.chdir(checkout)
    assert next(ai_toolkit(None)).text.startswith(f"0.9.1 in {checkout}")


def test_a_card_and_none(card, monkeypatch):
    (line,) = probes.cards()
    assert str(line) == "✓ GPU 0: NVIDIA L40S, compute capability 8.9, driver 580.65, 47.4 of 48.0 GB free"
    card.free = 3e9
    assert [line.mark for line in probes.cards()] == ["✗"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(probes, "driver_names", list)
    lines = [*probes.cards(), *probes.fp8_gemms(), *probes.triton(), *probes.attention()]
    assert [line.mark for line in lines] == ["-"] * 4


def test_a_card_that_torch_cannot_use(monkeypatch, no_card):
    monkeypatch.setattr(probes, "driver_names", lambda: ["Tesla T4, driver 470.1"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    error = RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)")
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (line,) = probes.cards()
    assert (line.stops, "CUDA 13.0" in line.remedy) == (True, True)
    assert "too old (found version 11040)" in line.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (line,) = probes.cards()
    assert (line.stops, "hidden by CUDA_VISIBLE_DEVICES" in line.text) == (False, True)


def test_names_of_the_driver(monkeypatch):
    answers = [subprocess.CalledProcessError(9, "x"), FileNotFoundError("x"), subprocess.TimeoutExpired("x", 10)]
    answers.append(SimpleNamespace(stdout="NVIDIA H200, 570.1\n"))
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=answers))
    assert [probes.driver_names() for _ in answers] == [[], [], [], ["NVIDIA H200, driver 570.1"]]


def test_fp8_of_a_card(card, monkeypatch):
    found = {kind: {"us": 1.0, "tflops": 1200.0, "db": 55.0} for kind in on_gpu.KINDS}
    found["per_row"] = {"refused": "no kernel"}
    found["int8"] = {"us": 1.0, "tflops": 9.0, "db": 12.0, "error": "wrong values"}
    monkeypatch.setattr(on_gpu, "try_product", lambda kind, *_: found[kind])
    refused, wrong, fast = probes.fp8_gemms()
    assert [(line.mark, line.stops) for line in (refused, wrong, fast)] == [("✗", False), ("✗", False), ("✓", False)]
    assert ("per_row" in refused.text, "int8" in wrong.text, "wrong values" in wrong.text) == (True, True, True)
    assert "bf16 1,200.0 TFLOP/s, per_tensor 1,200.0 TFLOP/s" in fast.text
    found |= {kind: {"refused": "no kernel image"} for kind in found}
    assert [line.stops for line in probes.fp8_gemms()] == [True, *[False] * (len(found) - 1)]
    card.capability = (8, 6)
    (line,) = probes.fp8_gemms()
    assert (line.mark, "coat.fallback" in line.text) == ("-", True)


@pytest.mark.parametrize("kind", on_gpu.KINDS)
def test_a_product_is_compared_and_timed(kind, monkeypatch):
    """Values as fp32 has them, time as operations over seconds; refusals and wrong values are told apart."""
    how = (kind, 48, 32, 64, torch.device("cpu"), (1, 1))
    figures = on_gpu.try_product(*how)
    assert figures["db"] > 45
    assert figures["tflops"] == pytest.approx(2 * 48 * 32 * 64 / (1e-6 * figures["us"]) / 1e12)
    assert not {"error", "refused"} & figures.keys()

    others = {"bf16": (torch.nn.functional, "linear"), "int8": (on_gpu, "int8_mm")}
    place = others.get(kind, (on_gpu, "scaled_mm"))
    monkeypatch.setattr(*place, Mock(return_value=torch.ones(48, 32)))
    assert "must be 30 or more" in on_gpu.try_product(*how)["error"]
    monkeypatch.setattr(*place, Mock(side_effect=RuntimeError("no\nkernel")))
    assert on_gpu.try_product(*how) == {"error" if kind == "bf16" else "refused": "RuntimeError: no"}


def test_the_report_has_figures_of_each_process_and_a_line_for_one_without_a_result(monkeypatch, capsys, tmp_path):
    asked = []

    def start(spec, seconds, module):
        kind = spec["configuration"]
        asked.append((kind, spec["device"], module))
        if kind == "int8":
            return {"status": "failed", "reason": "signal 11 and no result"}
        if kind in (on_gpu.MACHINE, on_gpu.OPERATORS):
            return {"status": "ok", "items": {}}
        result = on_gpu.run({**spec, "device": "cpu"})
        assert (result["status"] == "failed") == ("wrong values" in result["reason"]) == (kind == "bf16")
        return result

    figures = {"bf16": {"error": "wrong values"}, "per_row": {"us": 12.0, "tflops": 345.0}}
    monkeypatch.setattr(on_gpu, "try_product", lambda kind, *_: figures.get(kind, {"refused": "no"}))
    monkeypatch.setattr(on_gpu, "start_worker", start)
    monkeypatch.setattr(probes, "PROBES", ())
    monkeypatch.chdir(tmp_path)
    main(["doctor", "--gpu"])
    shown = capsys.readouterr().out.splitlines()
    assert {"per_row, 3072 -> 9216: us 12, tflops 345", "int8: signal 11 and no result"} <= set(shown)
    assert asked == [(kind, "cuda", on_gpu.__name__) for kind in (on_gpu.MACHINE, *on_gpu.KINDS, on_gpu.OPERATORS)]


@pytest.mark.triton
def test_operators_of_a_step_are_proved(monkeypatch):
    """Of conversion, forward, backward and update; what is wrong with one, where time ran out, what a card refuses."""
    proved = []

    def prove(calls, device, hang_s, budget_s):
        assert 0 < hang_s < budget_s < 100
        proved.extend(dict.fromkeys(call.operator for call in calls))
        return {proved[0]: "", proved[1]: "values are off"}

    def steps(row, *how, measure_steps=on_gpu.measure_steps):
        if row.name == "coat_int8":
            raise RuntimeError("no products\nhere")
        return measure_steps(row, *how)

    monkeypatch.setattr(on_gpu, "prove", prove)
    monkeypatch.setattr(on_gpu, "measure_steps", steps)
    spec = {"geometry": {"double": 3, "single": 3, "heads": 1, "rank": 4}, "sizes": [[16, 1]], "device": "cpu"}
    with as_on_cuda(monkeypatch):
        result = on_gpu.run(spec | {"configuration": on_gpu.OPERATORS, "seconds": 120.0})
    assert result["items"]["coat_int8"] == {"refused": "RuntimeError: no products"}
    of_a_step = {"norm_modulate_quantize", "gated_sum_backward", "qkv_mlp_backward", "fp8_adamw_step"}
    assert {f"coat::{name}" for name in of_a_step} <= set(proved)
    assert result["items"][proved[0]] == {"kernel": "agrees with its reference"}
    assert (result["status"], result["reason"]) == ("failed", f"{proved[1]}: values are off")
    assert "not compared" in result["items"][proved[-1]]["kernel"]


@pytest.mark.usefixtures("card")
def test_what_triton_needs_and_a_display_are_named_with_their_remedies(tmp_path, monkeypatch):
    versions = {"triton": "3.7.1"}
    have_packages(monkeypatch, versions)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["filelock", 'triton==3.7.1; system == "Linux"'])
    monkeypatch.setattr(environment, "WINDOWS", False)
    monkeypatch.setattr(environment.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "/opt/cc" else None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (22.5e9, 24e9))
    monkeypatch.setenv("CC", "/opt/cc")
    device = torch.device("cuda", 0)
    triton, display = environment.gpu_notes(device)
    assert ("Python.h" in triton, "python3-dev" in triton) == (True, True)
    assert ("0.9 of its 24.0 GB" in display, "another card" in display) == (True, True)
    assert usable_bytes(device) == pytest.approx(22.5e9 - 0.04 * 24e9)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (23.5e9, 24e9))
    assert environment.gpu_notes(device) == environment.gpu_notes(torch.device("cpu")) == []
    assert usable_bytes(device) == room_of(24e9) == 0.92 * 24e9
    assert room_of(8e9) == 8e9 - 1.28e9
    monkeypatch.delenv("CC")
    assert "no C compiler" in environment.triton_problem()[0]
    versions["triton"] = "3.5.1"
    problem, remedy = environment.triton_problem()
    assert ("triton 3.5.1" in problem, remedy) == (True, "pip install 'triton==3.7.*'")
    versions.clear()
    assert environment.triton_problem() == ("triton is not installed", "pip install 'triton==3.7.*'")
    versions["triton-windows"] = "3.7.0.post1"
    monkeypatch.setattr(environment, "WINDOWS", True)
    assert environment.triton_problem() is None


@pytest.mark.parametrize(("reason", "mark", "remedy"), [(None, "✓", ""), ("no gcc", "✗", "set CC")])
def test_triton(card, monkeypatch, reason, mark, remedy):
    have_packages(monkeypatch, {"triton": "3.9.0"})
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [])  # a torch that pins no triton
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda _: reason)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    (line,) = probes.triton()
    assert (line.mark, remedy in line.remedy, "3.9.0" in line.text) == (mark, True, True)
