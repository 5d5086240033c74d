"""Jobs of other models than FLUX.1 in the real ai-toolkit: from start to saved LoRA, on its own bases, resumed.

Tiny models with random weights that ai-toolkit's own loaders read; tests/helpers/aitk_folders.py has the substitutes.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from coat_flux.trainers.ai_toolkit.install import install
from tests.architecture.sources import ROOT
from tests.helpers.aitk_standin.real import Checkout, as_kontext, make_real_entry
from tests.helpers.asserts import assert_bitwise

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

STEPS = 4
PLACES = {
    "flux": "models/flux",
    "flux_kontext": "models/flux_kontext",
    "flux2_klein_4b": "models/flux2_klein_4b",
    "zimage": "models/zimage",
}
NO_SAMPLES = ("flux_kontext",)  # its pipeline wants a control image
BASES = ("coat_fp8", "qfloat8", "uint4")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with the tiny models, and the extension that substitutes sizes, in place."""
    checkout = Checkout(tmp_path_factory.mktemp("aitk") / "ait")
    install(checkout.root)
    command = [os.environ.get("AI_TOOLKIT_PYTHON", sys.executable), str(ROOT / "tests" / "helpers" / "aitk_folders.py")]
    done = subprocess.run([*command, str(checkout.root)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    as_kontext(checkout.root / "models" / "flux", checkout.root / "models" / "flux_kontext")
    return checkout


def entry_of(arch: str, qtype: str, steps: int) -> dict[str, Any]:
    entry = make_real_entry(steps=steps, batch_size=1)
    entry["model"] = {
        "name_or_path": PLACES[arch],
        "arch": arch,
        "quantize": True,
        "qtype": qtype,
        "quantize_te": False,
    }
    entry["train"]["lr_scheduler"] = "constant"
    entry["save"].update(save_every=STEPS // 2, dtype="float32")
    entry["sample"].update(sample_every=STEPS, sample_steps=2, prompts=["a plain red [trigger]"])
    entry["train"]["disable_sampling"] = arch in NO_SAMPLES
    entry["datasets"][0].update(resolution=[64], cache_latents_to_disk=False)
    if arch == "flux_kontext":
        entry["datasets"][0]["control_path"] = entry["datasets"][0]["folder_path"]
    return entry


def test_streamed_weights_change_no_bit(checkout: Checkout) -> None:
    """`coat.memory.stream_blocks`: quantized at load or after it, all or as memory needs it; and resumed."""
    asked: dict[str, Any] = {
        "resident": (0, True),
        "all": ("all", True),
        "auto": ("auto", True),
        "late": ("all", False),
    }
    jobs = []
    for name, (stream, at_load) in asked.items():
        entry = entry_of("flux", "coat_fp8", STEPS)
        entry["coat"]["memory"] = {"checkpointing": "none", "stream_blocks": stream}
        entry["model"].update(quantize=at_load, quantize_te=at_load)
        jobs.append((f"streamed_{name}", entry))
    half = copy.deepcopy(jobs[1][1])
    half["train"]["steps"] = STEPS // 2
    checkout.run_several([*jobs, ("streamed_resumed", half), ("streamed_resumed", jobs[1][1])])
    expected = checkout.lora("streamed_resident")
    for name in ("all", "auto", "resumed"):
        checkout.assert_same_lora("streamed_resident", f"streamed_{name}")
    assert checkout.lora("streamed_late").keys() == expected.keys()
    log = (checkout.folder("streamed_all") / "coat" / "log.txt").read_text(encoding="utf-8")
    assert re.search(r"streamed weights +all +4 of 4 blocks", log)


@pytest.mark.parametrize("arch", PLACES)
def test_jobs_run_to_their_loras_and_resumed_ones_end_with_the_same(checkout: Checkout, arch: str) -> None:
    jobs = []
    for qtype in BASES:
        jobs.append((f"{arch}_{qtype}", entry_of(arch, qtype, STEPS)))
        jobs += [(f"{arch}_{qtype}_resumed", entry_of(arch, qtype, steps)) for steps in (STEPS // 2, STEPS)]
    out = checkout.run_several(jobs)
    assert out.count(f"Found step {STEPS // 2} in metadata") == len(BASES)
    for qtype in BASES:
        whole, resumed = f"{arch}_{qtype}", f"{arch}_{qtype}_resumed"
        lora = checkout.lora(whole)
        assert lora
        assert all(value.isfinite().all() for value in lora.values())
        assert sum(bool(value.any()) for value in lora.values()) > 0.8 * len(lora)  # a last block's text leads nowhere
        samples = list((checkout.folder(whole) / "samples").glob("*.jpg"))
        assert bool(samples) == (arch not in NO_SAMPLES)
        log = (checkout.folder(whole) / "coat" / "log.txt").read_text(encoding="utf-8")
        assert "kept in FP8" in log
        assert ("its own products, gradients by the dequantized weight" in log) == (qtype != "coat_fp8")
        checkout.assert_same_lora(whole, resumed)
        states = checkout.optimizer(whole)["state"], checkout.optimizer(resumed)["state"]
        for index, state in states[0].items():
            for key, value in state.items():
                assert_bitwise(torch.as_tensor(states[1][index][key]), torch.as_tensor(value))
