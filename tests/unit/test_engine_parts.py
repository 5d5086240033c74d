"""Small parts of the engine: seeds, LoRA and its average, optimizers, schedules, files, launch check."""

from __future__ import annotations

import copy
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from coat_core.linear.module import FP8Linear
from coat_core.optim import FP8AdamW
from coat_flux.blocks.apply import apply_coat
from coat_flux.config.coat import COATConfig
from coat_flux.config.job_sections import NetworkKwargs, NetworkSection
from coat_flux.saves.errors import ResumeError
from coat_flux.saves.rng import Stream, generator_for, mixed_seed, seed_global
from coat_flux.saves.state import restore_tensors
from coat_flux.trainers.optimizer import advance, make_optimizer, make_scheduler, restore_optimizer
from coat_flux.trainers.standalone import saving
from coat_flux.trainers.standalone.loading import ModelLoadError, load_encoders
from coat_flux.trainers.standalone.network import LoraEMA, add_lora, lora_targets
from coat_flux.trainers.standalone.workers import Workers
from tests import tolerances
from tests.helpers.asserts import assert_bitwise


def param(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def test_seeds_differ_by_seed_stream_and_index() -> None:
    seeds = {mixed_seed(s, stream, i) for s in range(4) for stream in Stream for i in range(50)}
    assert len(seeds) == 4 * len(Stream) * 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    seed_global(1, Stream.MODEL, 5)
    assert_bitwise(torch.rand(2), torch.rand(2, generator=generator_for(1, Stream.MODEL, 5)))


# -- the LoRA ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> FluxTransformer2DModel:
    sizes = {"num_layers": 2, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2}
    widths = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (8, 12, 12)}
    return FluxTransformer2DModel(**sizes, **widths, guidance_embeds=True).bfloat16()


def network(only: Any = None, ignore: Any = (), **keys: Any) -> NetworkSection:
    return NetworkSection(network_kwargs=NetworkKwargs(only, ignore), **keys)


def test_targets_are_the_linears_of_the_blocks_or_all_by_words_as_in_ai_toolkit(model: FluxTransformer2DModel) -> None:
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert set(lora_targets(model, network())) == {name for name in linears if "transformer_blocks." in name}
    assert set(lora_targets(model, network(transformer_only=False))) == linears
    for only, ignore, count in (
        (("transformer.single_transformer_blocks.0.",), (), 6),
        (("transformer_blocks$$1$$attn$$to_q",), (), 1),
        (("proj_out",), (), 1),
        (None, ("attn",), 28 + 6 - 16 - 3),
        (("to_q", "to_k"), ("single",), 4),
    ):
        assert len(lora_targets(model, network(only, ignore))) == count
    with pytest.raises(ValueError, match=r"only_if_contains.*34 linears.*transformer\.transformer_blocks\.0"):
        lora_targets(model, network(("to_qq",)))


def test_only_the_adapters_train_in_fp32_and_start_as_the_identity(model: FluxTransformer2DModel) -> None:
    """Of a target outside the blocks, proj_out, too, but not of all linears with that ending."""
    section = network(ignore=("single",), transformer_only=False)
    targets = lora_targets(model, section)
    assert "proj_out" in targets
    params = add_lora(model, section, 1)
    assert {name.rpartition(".lora_")[0].removeprefix("transformer.") for name in params} == set(targets)
    assert len(params) == 2 * len(targets)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in params.values()}
    assert {p.dtype for p in params.values()} == {torch.float32}
    down = params["transformer.transformer_blocks.0.ff.net.2.lora_A.weight"]
    assert down.shape == (4, 256)
    assert 0.5 / 16 < down.abs().max() <= 1 / 16
    assert all(p.count_nonzero() == 0 for name, p in params.items() if "lora_B" in name)


def test_start_values_follow_the_seed_and_peft_wraps_fp8_linears(model: FluxTransformer2DModel) -> None:
    fp8, other = copy.deepcopy(model), copy.deepcopy(model)
    apply_coat(fp8, COATConfig())
    assert lora_targets(fp8, network()) == lora_targets(model, network())
    name = "transformer.transformer_blocks.1.attn.to_v.lora_A.weight"
    plain = add_lora(model, network(), 3)[name]
    converted = add_lora(fp8, network(), 3)[name]
    reseeded = add_lora(other, network(), 4)[name]
    assert_bitwise(converted, plain)
    assert not torch.equal(reseeded, plain)
    layer = fp8.transformer_blocks[0].attn.to_q
    assert type(layer.base_layer) is FP8Linear
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert_bitwise(layer(x), layer.base_layer(x))


def test_saved_tensors_that_do_not_fit_are_refused_before_any_is_copied() -> None:
    own = {name: param(1.0, 2.0) for name in "ab"}
    saved = {name: torch.zeros(2) for name in "ab"}
    with pytest.raises(ResumeError, match=r"x\.safetensors: 1 LoRA names differ"):
        restore_tensors(own, {"a": saved["a"]}, "x.safetensors")
    with pytest.raises(ResumeError, match=r"\(3,\).*\(2,\)"):
        restore_tensors(own, saved | {"b": torch.zeros(3)}, "x.safetensors")
    assert all(tensor.all() for tensor in own.values())
    restore_tensors(own, saved, "x.safetensors")
    assert not any(tensor.any() for tensor in own.values())


# -- its average -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"use_feedback": True, "param_multiplier": 0.999})],
    ids=str,
)
def test_ema_has_the_bits_of_its_formula_and_is_taken_back_bit_for_bit(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    draw = torch.Generator().manual_seed(4)
    params = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((16, 20), (7,), (129, 3))]
    ema = LoraEMA({str(i): one for i, one in enumerate(params)}, 0.997, **options)
    shadows, copies = [one.clone() for one in ema.shadow.values()], [one.detach().clone() for one in params]
    for skipped in (None, torch.zeros(()), torch.ones(()), None):
        moves = [torch.randn(one.shape, generator=draw).to(dtype) for one in params]
        for one, other, shadow, move in zip(params, copies, shadows, moves, strict=True):
            one.data += move
            other += move
            if skipped is None or not skipped:
                delta = (shadow - other.float()) * (1.0 - 0.997)
                shadow.sub_(delta)
                if "use_feedback" in options:
                    other.add_(delta.to(dtype), alpha=10.0)
                other.mul_(options.get("param_multiplier", 1.0))
        ema.update(skipped)
    for average, shadow, one, other in zip(ema.shadow.values(), shadows, params, copies, strict=True):
        assert_bitwise(average, shadow)
        assert_bitwise(one.detach(), other)
        with ema.applied():
            assert_bitwise(one.detach(), shadow.to(dtype))
        assert_bitwise(one.detach(), other)


# -- optimizers and schedules ------------------------------------------------------------------------------------------


def test_optimizers_by_name() -> None:
    options = {"weight_decay": 0.3, "m2_format": "e5m2"}
    coat = make_optimizer("coat_fp8_adamw", [param(1.0)], 1e-3, COATConfig(), options)
    assert isinstance(coat, FP8AdamW)
    assert (coat.defaults["weight_decay"], coat.fp8_config.m2_format) == (0.3, "e5m2")
    plain = make_optimizer("adamw", [param(1.0)], 1e-3, COATConfig(), {"betas": (0.5, 0.6)})
    assert type(plain) is torch.optim.AdamW
    assert (plain.defaults["eps"], plain.defaults["betas"]) == (1e-6, (0.5, 0.6))
    assert type(make_optimizer("adam", [param(1.0)], 1e-3, COATConfig(), {})) is torch.optim.Adam


SCHEDULES = {
    "constant": ({}, [1, 1, 1, 1, 1]),
    "constant_with_warmup": ({"num_warmup_steps": 4}, [0, 0.25, 0.5, 0.75, 1]),
    "linear": ({}, [1 / 3, 0.5, 2 / 3, 5 / 6, 1]),
    "cosine": ({}, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
    "cosine_with_restarts": ({}, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 1]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_over_four_steps(name: str) -> None:
    params, wanted = SCHEDULES[name]
    rates = []
    for step in range(5):
        optimizer = torch.optim.SGD([param(1.0)], lr=1.0)
        advance(make_scheduler(name, optimizer, 4, params), step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(wanted, abs=tolerances.SIGMA_ATOL)


def test_restored_optimizer_keeps_state_and_the_configs_settings() -> None:
    weight = param(1.0)
    old = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1)
    weight.grad = torch.ones(1)
    old.step()
    new = torch.optim.AdamW([weight], lr=5e-4, weight_decay=0.2)
    saved = old.state_dict()
    saved["param_groups"][0]["initial_lr"] = 1e-3
    assert restore_optimizer(new, saved) == ["weight_decay 0.1 -> 0.2"]
    group = new.param_groups[0]
    assert (group["lr"], group["weight_decay"], "initial_lr" in group) == (5e-4, 0.2, False)
    assert_bitwise(new.state[weight]["exp_avg"], old.state[weight]["exp_avg"])


# -- files and launches ------------------------------------------------------------------------------------------------


def test_rotation_keeps_the_newest_and_never_the_final(tmp_path: Path) -> None:
    names = [saving.save_name("run", step) for step in (500, 1000, 1500, None)]
    assert names[0] == "run_000000500.safetensors"
    for name in (*names, "run_two_000000001.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in saving._old_saves(tmp_path, "run", 2)] == [names[0]]
    assert saving._old_saves(tmp_path, "run", 3) == []


def test_metadata_values_are_strings_and_placeholders_are_filled() -> None:
    meta = {"name": "[name]", "version": "1.0", "tags": ["a"]}
    job = SimpleNamespace(name="shirt", meta=meta, trigger_word=None, coat=COATConfig())
    saved = saving._metadata(SimpleNamespace(job=job, report=None, step=3, epoch=1))
    assert all(isinstance(value, str) for value in saved.values())
    assert (saved["name"], saved["version"], json.loads(saved["tags"])) == ("shirt", "1.0", ["a"])
    assert json.loads(saved["software"]) == {"name": "coat-flux", "version": version("coat-flux")}
    assert json.loads(saved["training_info"]) == {"step": 3, "epoch": 1}
    assert "ss_tag_frequency" not in saved


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that must be missing")
def test_missing_gpu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers("cuda:0")
    assert (workers.device, workers.rank, workers.size, workers.is_main) == (torch.device("cpu"), 0, 1, True)
    assert "device=cuda:0" in caplog.text
    workers.close()


def test_weights_come_only_from_safetensors(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"vae/.*pickle \(diffusion_pytorch_model\.bin\)"):
        load_encoders(str(tmp_path), torch.bfloat16)
