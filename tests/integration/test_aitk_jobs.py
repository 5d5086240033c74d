"""Whole jobs of the ai-toolkit extension in the stand-in: what is trained, saved, resumed and left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.aitk_standin.host import COAT_ENTRY, Host, standin_host  # noqa: F401
from tests.helpers.asserts import assert_bitwise

BLOCK_LINEARS = {
    f"{blocks}.0.attn.{name}"
    for blocks in ("transformer_blocks", "single_transformer_blocks")
    for name in ("to_q", "to_k")
}
PHASES = ["before_forward", "after_forward", "after_backward", "after_optimizer_step"]


def _spy(host: Host, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record what the model and the LoRA are made of when training begins."""
    seen: dict[str, Any] = {}
    host.start()
    trainer = host.load("coat_flux.trainers.ai_toolkit.process").CoatFluxTrainer
    converted_linears = host.load("coat_flux.trainers.ai_toolkit.quantizer").converted_linears
    begin = trainer.hook_before_train_loop

    def look(self: Any) -> None:
        seen["converted"] = {name for name, _ in converted_linears(self.sd.unet)}
        seen["encoder_gemms"] = [
            m.coat_linear_config.use_fp8_gemm for _, m in converted_linears(self.sd.text_encoder[0])
        ]
        seen["can_merge_in"] = self.network.can_merge_in
        seen["adapters"] = [type(lora.lora_down).__name__ for lora in self.network.unet_loras]
        begin(self)

    monkeypatch.setattr(trainer, "hook_before_train_loop", look)
    return seen


@pytest.mark.parametrize("at_load", [True, False])
def test_job_trains_in_fp8(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at_load: bool
) -> None:
    seen = _spy(host, monkeypatch)
    entry = {**COAT_ENTRY, "model": COAT_ENTRY["model"] if at_load else {}, "coat": {"memory": {"log_every": 2}}}
    process = host.run(**entry)
    printed = capsys.readouterr().out
    assert "Allocated" not in printed
    assert max(map(len, printed.split("transformer_blocks.*")[1].splitlines())) <= 100  # the start table
    lines = [line[21:] for line in (host.save_folder / "coat" / "log.txt").read_text(encoding="utf-8").splitlines()]
    assert seen["converted"] == BLOCK_LINEARS
    assert seen["encoder_gemms"] == ([False] if at_load else [])
    assert seen["can_merge_in"] is False
    assert seen["adapters"] == ["FP8InputLinear"] * 4
    assert len(process.losses) == 3
    assert "backward" not in vars(process.accelerator)  # which other jobs of the command share
    state = host.optimizer()["state"][1]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float8_e4m3fn
    assert state["exp_avg"].view(torch.uint8).any()
    assert [line[1:].split("]")[0] for line in lines if "Step 2: Allocated" in line] == PHASES
    assert not any("Step 1: Allocated" in line or "Step 3: Allocated" in line for line in lines)
    assert any("outside the blocks: kept in high precision" in line for line in lines)
    counts = (4, 0) if at_load else (0, 4)
    assert any("FP8 weights: {} linears at load, {} after it".format(*counts) in line for line in lines)
    assert any("LoRA inputs in FP8: 4 shared with their base linear" in line for line in lines)


def test_fp8_gemms_without_fp8_weights_still_get_adapters(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _spy(host, monkeypatch)
    host.run(train=COAT_ENTRY["train"], coat={"weight": {"use_fp8": False}})
    assert seen["converted"] == set()
    assert len(seen["adapters"]) == 4


def test_disabled_is_the_hosts_own_run(host: Host) -> None:
    host.run("sd_trainer", training_folder=str(host.root / "own"), train={"optimizer": "adamw"})
    host.run(train={"optimizer": "adamw"}, coat={"enabled": False})
    expected = host.lora("own")
    for name, value in host.lora().items():
        assert_bitwise(value, expected[name])
    assert host.optimizer()["state"][1]["exp_avg"].dtype == torch.float32


def test_plain_job_is_the_same_with_and_without_the_extension(host: Host) -> None:
    host.run("sd_trainer", training_folder=str(host.root / "beside"), train={"optimizer": "adamw"})
    (host.root / "extensions" / "coat_flux").unlink()
    original = host.load("toolkit.optimizer").get_optimizer._coat_flux_original
    for module in ("toolkit.optimizer", "jobs.process.BaseSDTrainProcess", "jobs.process.TrainVAEProcess"):
        host.load(module).get_optimizer = original
    host.run("sd_trainer", train={"optimizer": "adamw"})
    beside = host.lora("beside")
    for name, value in host.lora().items():
        assert_bitwise(value, beside[name])


def test_changed_optimizer_params_count_after_a_resume(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.run(**COAT_ENTRY)
    train = {**COAT_ENTRY["train"], "optimizer_params": {"weight_decay": 0.5, "block_size": 32}}
    host.run(**{**COAT_ENTRY, "train": train})
    out = capsys.readouterr().out
    group = host.optimizer()["param_groups"][0]
    assert (group["weight_decay"], group["fp8"]["block_size"]) == (0.5, 32)
    assert "weight_decay is 0.5 as configured, not 0.01 as in the file" in out
    assert "WARNING" in out
    assert "re-quantized" in out


def test_failed_resume_ends_the_run(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from coat_core.optim import FP8AdamW

    def refuse(self: Any, state: Any) -> None:
        raise ValueError("exp_avg: other shape")

    host.run(**COAT_ENTRY)
    with monkeypatch.context() as patch:
        patch.setattr(FP8AdamW, "load_state_dict", refuse)
        with pytest.raises(RuntimeError, match=r"resume: .*optimizer\.pt could not be loaded \(exp_avg: other shape\)"):
            host.run(**COAT_ENTRY)
    assert "[coat] ERROR: " in capsys.readouterr().out
    monkeypatch.setattr(host.load("jobs.process.BaseSDTrainProcess").BaseSDTrainProcess, "_load_optimizer", lambda _: 0)
    with pytest.raises(
        RuntimeError, match=r"optimizer\.pt exists but ai-toolkit did not load it; .*pretrained_lora_path"
    ):
        host.run(**COAT_ENTRY)


def test_config_of_a_job_does_not_reach_the_next(host: Host) -> None:
    host.run(**COAT_ENTRY, coat={"optimizer": {"block_size": 32}})
    assert host.optimizer()["param_groups"][0]["fp8"]["block_size"] == 32
    host.run("sd_trainer", training_folder=str(host.root / "next"), **COAT_ENTRY)
    assert host.optimizer("next")["param_groups"][0]["fp8"]["block_size"] == 128


def test_failures_swallowed_at_load_end_the_run(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.edit("toolkit/util/quantize.py", "convert_linear_to_ostris(module, weights)", "raise MemoryError('no room')")
    with pytest.raises(RuntimeError, match="loading with qtype coat_fp8 converted no linear"):
        host.run(**COAT_ENTRY)
    assert "Failed to quantize transformer_blocks.0.attn.to_q: no room" in capsys.readouterr().out


def test_other_job_types_say_in_one_line_each_what_is_in_force(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.start()
    host.run("sd_trainer", training_folder=str(host.root / "one"), **COAT_ENTRY)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[coat]")]
    assert [line.partition(": ")[0] for line in lines] == ["[coat] qtype coat_fp8", "[coat] optimizer coat_fp8_adamw"]
    linears = sum(1 for name in host.lora("one") if "lora_A" in name) + 3  # around the blocks, and in the text encoder
    assert lines[0] == (
        f"[coat] qtype coat_fp8: {linears} linears hold FP8, W e4m3/per_tensor, x e4m3/per_row, dy e5m2"
    )
    assert "exp_avg e4m3 (block 128, expanded), exp_avg_sq e4m3 (block 128, expanded)" in lines[1]
    host.run("sd_trainer", training_folder=str(host.root / "two"), train={"optimizer": "adamw"})
    assert "[coat]" not in capsys.readouterr().out
    host.run(**COAT_ENTRY)
    assert "qtype coat_fp8: " not in capsys.readouterr().out
