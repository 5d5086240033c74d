"""`coat-flux doctor` on GPUs: what it says of cards, FP8 and Triton; the probes' inputs are made up here."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from coat_core.ops import attention_trial, dispatch, scaled_mm
from coat_flux.doctor import gpu


def texts(lines):
    return [str(line) for line in lines]


@pytest.fixture
def card(monkeypatch):
    """A GPU as torch would report it; its fields may be changed."""
    card = SimpleNamespace(name="NVIDIA L40S", capability=(8, 9), free=40e9, total=48e9, driver="580.65")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card.capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card.free, card.total))
    monkeypatch.setattr(gpu, "driver_names", lambda: [f"{card.name}, driver {card.driver}"])
    return card


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "driver_names", list)


def test_a_card(card):
    assert texts(gpu.cards()) == [
        "✓ GPU 0: NVIDIA L40S, compute capability 8.9, driver 580.65, 40.0 of 48.0 GB free",
    ]
    card.free = 3e9
    assert texts(gpu.cards())[0].endswith("3.0 of 48.0 GB free -> end what else uses it: nvidia-smi lists it")


@pytest.mark.usefixtures("no_card")
def test_without_a_card():
    assert texts([*gpu.cards(), *gpu.fp8_gemms()]) == [
        "- GPU: no NVIDIA GPU here",
        "- FP8: no NVIDIA GPU here; on a CPU FP8 GEMMs are computed in fp32, which is slow",
    ]


def test_a_card_that_torch_cannot_use(monkeypatch, no_card):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)")

    monkeypatch.setattr(gpu, "driver_names", lambda: ["Tesla T4, driver 470.1"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (line,) = gpu.cards()
    assert line.stops
    assert line.text.endswith("cannot use it (The NVIDIA driver on your system is too old (found version 11040))")
    assert line.remedy.startswith("install a driver for CUDA 13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (line,) = gpu.cards()
    assert str(line) == "✗ GPU: Tesla T4, driver 470.1, hidden by CUDA_VISIBLE_DEVICES -> unset it to train there"


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("NVIDIA H200, 570.1\n", ["NVIDIA H200, driver 570.1"]),
        (subprocess.CalledProcessError(9, "nvidia-smi"), []),
        (FileNotFoundError("nvidia-smi"), []),
        (subprocess.TimeoutExpired("nvidia-smi", 10), []),
    ],
)
def test_what_the_driver_says(monkeypatch, answer, names):
    def run(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu.driver_names() == names


def test_an_older_card_has_no_fp8(card):
    card.capability = (8, 6)
    (line,) = gpu.fp8_gemms()
    assert line.mark == "-"
    assert "coat.fallback" in line.text


def test_attention_kernels_by_name(card, monkeypatch):
    """What is tried runs on a CPU here: the kernels of GPUs are refused, and one is made up to run."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **how: empty(*shape, **how))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(attention_trial, "GPU_KERNELS", ("plain", "fa3"))
    (line,) = texts(gpu.attention())
    start = "✓ attention on GPU 0: plain, torch chooses flash_cpu; fa3: not installed (No module named"
    assert line.startswith(start)


@pytest.mark.usefixtures("no_card")
def test_attention_without_a_card():
    assert texts(gpu.attention()) == ["- attention: no NVIDIA GPU here; torch's kernel for a CPU runs"]


def test_rates_in_words(card, monkeypatch):
    monkeypatch.setattr(gpu, "rates", lambda _: {"per_tensor": 1200.0, "per_row": "no kernel", "bf16": 600.0})
    slow, fast = gpu.fp8_gemms()
    assert (slow.mark, slow.text, slow.stops) == ("✗", "per_row GEMM does not run: no kernel", False)
    assert str(fast) == "✓ FP8 on GPU 0: per_tensor 1,200.0 TFLOP/s, bf16 600.0 TFLOP/s"
    monkeypatch.setattr(gpu, "rates", lambda _: dict.fromkeys(("per_tensor", "per_row", "bf16"), "no kernel image"))
    assert [line.stops for line in gpu.fp8_gemms()] == [False, False, True]


def test_rates_are_operations_over_seconds(monkeypatch):
    """With a clock that advances 1 ms at each FP8 product, and a little at each look at it."""
    clock = SimpleNamespace(now=0.0)
    real = scaled_mm.scaled_mm

    def look():
        clock.now += 1e-7
        return clock.now

    def product(*args):
        clock.now += 1e-3
        return real(*args)

    monkeypatch.setattr("coat_flux.bench.timing.time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(gpu, "SECONDS_EACH", 0.01)
    monkeypatch.setattr(scaled_mm, "scaled_mm", product)
    monkeypatch.setattr(scaled_mm, "unsupported_reason", lambda _, a, b, row_wise: "no" if row_wise else None)
    found = gpu.rates(torch.device("cpu"))
    assert found["per_tensor"] == pytest.approx(2 * 64**3 / 1e-3 / 1e12, rel=1e-3)
    assert found["per_row"] == "no"
    assert found["bf16"] > 100 * found["per_tensor"]


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (None, "✓ Triton on GPU 0: 3.9.0, a kernel compiles, runs and agrees with its reference"),
        (
            "no gcc",
            "✗ Triton on GPU 0: 3.9.0, the slower reference runs: no gcc -> use the triton that belongs to this torch",
        ),
    ],
)
def test_triton(card, monkeypatch, reason, line):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu, "_triton_version", lambda: "3.9.0")
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda _: reason)
    assert texts(gpu.triton()) == [line]


def test_triton_is_missing_or_interpreted(card, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu, "_triton_version", lambda: None)
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda _: "triton is not installed")
    (line,) = gpu.triton()
    assert line.remedy.startswith("pip install triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert texts(gpu.triton())[0].endswith("kernels run in Python, thousands of times slower -> unset it")
