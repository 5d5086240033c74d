"""The extension in a real ai-toolkit checkout, on a CPU: `configs/flux_clothing_tiny.yaml`, shortened, through run.py.

AI_TOOLKIT_ROOT is the checkout; AI_TOOLKIT_PYTHON is the interpreter that has its requirements (default: this one).
docs/ai-toolkit.md says how to make both on a machine without a GPU. The checkout itself is not written to: the jobs run
in a temporary folder of links to it.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from coat_flux.trainers.ai_toolkit.install import install
from tests.helpers.aitk_standin.ends import assert_same_end
from tests.helpers.aitk_standin.real import STEPS, Checkout, make_plain_entry, make_real_entry, real_checkout  # noqa: F401
from tests.tolerances import FLOW_DIRECTION_COSINE

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

EXTENSION = "extensions/coat_flux"
LINEARS = 3 * 14 + 6 * 6  # of the mini-FLUX's blocks
AROUND = 24  # outside of them, and in the text encoder T5, which ai-toolkit's own quantization takes too


@pytest.fixture(scope="module")
def first_run(checkout: Checkout) -> str:
    return checkout.run("coat_job", make_real_entry())


def test_job_runs_from_start_to_lora_and_samples(checkout: Checkout, first_run: str) -> None:
    lora = checkout.lora("coat_job")
    assert len(lora) == 2 * LINEARS
    assert all(key.startswith("transformer.") and key.endswith((".lora_A.weight", ".lora_B.weight")) for key in lora)
    assert all(value.isfinite().all() for value in lora.values())
    assert any(value.any() for key, value in lora.items() if ".lora_B." in key)
    samples = [path for path in (checkout.folder("coat_job") / "samples").iterdir() if path.suffix == ".jpg"]
    assert len(samples) == 3 * 4  # at the start, in the middle and at the end, of four prompts
    state = checkout.optimizer("coat_job")["state"]
    assert len(state) == 2 * LINEARS
    assert {state[i][key].dtype for i in state for key in ("exp_avg", "exp_avg_sq")} == {torch.float8_e4m3fn}
    assert f"[coat] FP8 weights: {LINEARS} linears at load, 0 after it" in first_run
    assert "[coat] optimizer coat_fp8_adamw: FP8AdamW" in first_run
    log = (checkout.folder("coat_job") / "coat" / "log.txt").read_text(encoding="utf-8")
    assert "outside the blocks: kept in high precision" in log
    for phase in ("before_forward", "after_forward", "after_backward", "after_optimizer_step"):
        assert f"[{phase}] Step {STEPS}: Allocated: " in log
    assert "Allocated: " not in first_run


def test_saved_lora_loads_in_diffusers(checkout: Checkout, first_run: str) -> None:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(checkout.root / "models" / "coat_mini_flux", subfolder="transformer")
    model.load_lora_adapter(dict(checkout.lora("coat_job")), prefix="transformer")
    loaded = {name for name, _ in model.named_parameters() if ".lora_A." in name}
    assert len(loaded) == LINEARS


def test_names_work_in_a_job_of_ai_toolkits_own_type(checkout: Checkout) -> None:
    entry = make_real_entry()
    del entry["coat"]
    entry["train"]["optimizer_params"] = {"weight_decay": 1e-4, "m2_format": "e5m2", "block_size": 64}
    out = checkout.run("own_type", {**entry, "type": "sd_trainer"})
    assert f"[coat] qtype coat_fp8: {AROUND + LINEARS} linears hold FP8, W e4m3/per_tensor, x e4m3/per_row" in out
    assert "[coat] optimizer coat_fp8_adamw: FP8AdamW over" in out
    assert "exp_avg e4m3 (block 64, expanded), exp_avg_sq e5m2 (block 64, expanded)" in out
    state = checkout.optimizer("own_type")["state"][0]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert state["exp_avg_scale"].numel() == -(-state["exp_avg"].numel() // 64)
    assert any(value.any() for key, value in checkout.lora("own_type").items() if ".lora_B." in key)


def test_plain_job_beside_it_is_untouched(checkout: Checkout) -> None:
    checkout.run("beside", make_plain_entry("sd_trainer"))
    (checkout.root / EXTENSION).unlink()
    try:
        checkout.run("without", make_plain_entry("sd_trainer"))
    finally:
        install(checkout.root)
    checkout.assert_same_lora("beside", "without")


def test_disabled_is_ai_toolkits_own_run(checkout: Checkout) -> None:
    checkout.run("own", make_plain_entry("diffusion_trainer"))
    checkout.run("disabled", {**make_plain_entry("coat_flux_trainer"), "coat": {"enabled": False}})
    checkout.assert_same_lora("own", "disabled")


FLOWS = {
    "fused": ({}, "none", "9 kept in FP8, fused flow, attention fp8"),
    "fused_bf16_attention": ({"attention": "bf16"}, "none", "9 kept in FP8, fused flow, attention bf16"),
    "generic": ({"flow": "generic"}, "none", "9 kept in FP8, generic flow, attention fp8"),
    "recomputed": ({}, "all", "9 recomputed"),
    "high_precision": ({"use_fp8": False}, "none", "9 kept in high precision"),
}


def _flow_entry(activation: dict[str, Any], checkpointing: str) -> dict[str, Any]:
    entry = make_real_entry()
    entry["coat"] = {**entry["coat"], "activation": activation}
    entry["coat"]["memory"] = {"checkpointing": checkpointing}
    return entry


def test_flows_and_recomputation_from_the_yaml_alone(checkout: Checkout, first_run: str) -> None:
    """After `first_run`, whose caching of latents draws random numbers, all runs see the same noise."""
    directions = {}
    for name, (activation, checkpointing, got) in FLOWS.items():
        out = checkout.run(f"flow_{name}", _flow_entry(activation, checkpointing))
        log = (checkout.folder(f"flow_{name}") / "coat" / "log.txt").read_text(encoding="utf-8")
        assert f"  blocks: {got}\n" in log
        assert "generic flow in place of" not in out
        lora = checkout.lora(f"flow_{name}")
        directions[name] = torch.cat([lora[key].float().flatten() for key in lora if ".lora_B." in key])
    for name, direction in directions.items():
        similarity = float(torch.nn.functional.cosine_similarity(direction, directions["high_precision"], dim=0))
        assert similarity >= FLOW_DIRECTION_COSINE, f"{name}: {similarity:.4f}"


def test_every_block_is_fused_with_several_images(checkout: Checkout) -> None:
    """ai-toolkit gives the network a multiplier for each image then."""
    entry = make_real_entry(steps=2, batch_size=2, disable_sampling=True)
    entry["coat"]["memory"] = {"checkpointing": "none"}
    out = checkout.run("batch", entry)
    log = (checkout.folder("batch") / "coat" / "log.txt").read_text(encoding="utf-8")
    assert "  blocks: 9 kept in FP8, fused flow, attention fp8\n" in log
    assert "flow in place of" not in out


@pytest.fixture(scope="module")
def whole(checkout: Checkout) -> dict[str, Any]:
    """All that has a state: average, schedule, accumulation, dropped captions in two loader processes."""
    average = {"use_ema": True, "ema_decay": 0.9}
    entry = make_real_entry(steps=8, gradient_accumulation=2, ema_config=average, lr_scheduler="cosine")
    entry["datasets"][0].update(caption_dropout_rate=0.5, num_workers=2)
    entry["sample"].update(prompts=entry["sample"]["prompts"][:1], sample_steps=1)
    entry["logging"] = {"verbose": True}  # memory lines are printed, too
    checkout.run("whole", entry)
    return entry


@pytest.mark.parametrize("moment", ["Saving at step 6", "[after_backward] Step 6"])
def test_a_killed_run_ends_as_the_one_that_was_not(checkout: Checkout, whole: dict[str, Any], moment: str) -> None:
    name = f"killed_{len(moment)}"
    code, _ = checkout.start(name, whole, at=moment, send=signal.SIGKILL)
    assert code == -signal.SIGKILL
    out = checkout.run(name, whole)
    assert "[coat] resume: continues after step 4" in out or "[coat] resume: continues after step 7" in out
    assert_same_end(checkout.folder("whole"), checkout.folder(name))
    checkout.assert_same_lora("whole", name)
