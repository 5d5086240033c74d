"""Small parts of the engine: seeds, EMA, optimizers, schedules, files, launch check."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coat_core.optim import FP8AdamW
from coat_flux.base.table import GrowingTable
from coat_flux.blocks.measure import GemmPick
from coat_flux.config.coat import COATConfig
from coat_flux.saves.rng import mixed_seed
from coat_flux.trainers.optimizer import advance, make_optimizer, make_scheduler, restore_optimizer
from coat_flux.trainers.standalone.ema import LoraEMA
from coat_flux.trainers.standalone.loading import ModelLoadError, load_encoders
from coat_flux.trainers.standalone.saving import lora_metadata, rotate_saves, save_dtype, save_name
from coat_flux.trainers.standalone.seeding import Stream, generator_for, seed_global
from coat_flux.trainers.standalone.workers import Workers, _check_launch
from coat_flux.watch.phases import PhaseTracker
from tests import tolerances
from tests.helpers.asserts import assert_bitwise


def param(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def test_seeds_differ_by_seed_stream_and_index() -> None:
    seeds = {mixed_seed(s, stream, i) for s in range(4) for stream in Stream for i in range(50)}
    assert len(seeds) == 4 * len(Stream) * 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    again = torch.randn(3, generator=generator_for(1, Stream.NOISE, 5))
    assert_bitwise(torch.randn(3, generator=generator_for(1, Stream.NOISE, 5)), again)
    seed_global(1, Stream.MODEL, 5)
    first = torch.rand(2)
    seed_global(1, Stream.MODEL, 5)
    assert_bitwise(torch.rand(2), first)


def test_ema_is_the_weighted_sum_of_the_past() -> None:
    weight = param(1.0, 2.0)
    ema = LoraEMA({"w": weight}, 0.75)
    history = [weight.detach().clone()]
    for _ in range(4):
        with torch.no_grad():
            weight.mul_(3)
        history.append(weight.detach().clone())
        ema.update()
    wanted = 0.75**4 * history[0] + sum(0.25 * 0.75 ** (4 - i) * history[i] for i in range(1, 5))
    torch.testing.assert_close(ema.shadow["w"], wanted, rtol=tolerances.FP32_ORDER_RTOL, atol=0.0)


def test_ema_is_applied_and_taken_back_bit_for_bit() -> None:
    weight = param(1.0, 1e-8)
    ema = LoraEMA({"w": weight}, 0.5)
    with torch.no_grad():
        weight.copy_(torch.tensor([3.0, 1.0 / 3]))
    ema.update()
    raw = weight.detach().clone()
    with ema.applied():
        assert_bitwise(weight.detach(), ema.shadow["w"])
    assert_bitwise(weight.detach(), raw)


def test_ema_feedback_and_multiplier_move_the_parameter() -> None:
    weight = param(1.0)
    ema = LoraEMA({"w": weight}, 0.9, use_feedback=True, param_multiplier=0.5)
    with torch.no_grad():
        weight.fill_(2.0)
    ema.update()
    assert ema.shadow["w"].item() == pytest.approx(1.1)
    assert weight.item() == pytest.approx((2.0 + 10 * (1.0 - 2.0) * 0.1) * 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"use_feedback": True}, {"use_feedback": True, "param_multiplier": 0.999}])
def test_ema_has_the_bits_of_its_formula(dtype: torch.dtype, options: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(4)
    params = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((16, 20), (7,), (129, 3))]
    ema = LoraEMA({str(i): one for i, one in enumerate(params)}, 0.997, **options)
    shadows, copies = [one.clone() for one in ema.shadow.values()], [one.detach().clone() for one in params]
    for skipped in (None, torch.zeros(()), torch.ones(()), None):
        moves = [torch.randn(one.shape, generator=draw).to(dtype) for one in params]
        for one, copy, shadow, move in zip(params, copies, shadows, moves, strict=True):
            one.data += move
            copy += move
            if skipped is None or not skipped:
                delta = (shadow - copy.float()) * (1.0 - 0.997)
                shadow.sub_(delta)
                if "use_feedback" in options:
                    copy.add_(delta.to(dtype), alpha=10.0)
                copy.mul_(options.get("param_multiplier", 1.0))
        ema.update(skipped)
    for found, shadow, one, copy in zip(ema.shadow.values(), shadows, params, copies, strict=True):
        assert_bitwise(found, shadow)
        assert_bitwise(one.detach(), copy)


def test_ema_refuses_bad_decay() -> None:
    with pytest.raises(ValueError, match=r"ema_decay=1\.5: must be from 0 to 1"):
        LoraEMA({"w": param(1.0)}, 1.5)


def test_optimizers_by_name() -> None:
    coat = make_optimizer(
        "COAT_FP8_AdamW", [param(1.0)], 1e-3, COATConfig(), {"weight_decay": 0.3, "m2_format": "e5m2"}
    )
    assert isinstance(coat, FP8AdamW)
    assert (coat.defaults["weight_decay"], coat.fp8_config.m2_format) == (0.3, "e5m2")
    plain = make_optimizer("adamw", [param(1.0)], 1e-3, COATConfig(), {"betas": (0.5, 0.6)})
    assert type(plain) is torch.optim.AdamW
    assert (plain.defaults["eps"], plain.defaults["betas"]) == (1e-6, (0.5, 0.6))
    assert type(make_optimizer("adam", [param(1.0)], 1e-3, COATConfig(), {})) is torch.optim.Adam
    with pytest.raises(ValueError, match=r"optimizer='sgd'.*coat_fp8_adamw, adamw"):
        make_optimizer("sgd", [param(1.0)], 1e-3, COATConfig(), {})


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

    def learning_rates(start: int) -> list[float]:
        optimizer = torch.optim.SGD([param(1.0)], lr=1.0)
        scheduler = make_scheduler(name, optimizer, 4, params)
        advance(scheduler, start)
        rates = []
        for _ in range(start, 5):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return rates

    whole = learning_rates(0)
    assert whole == pytest.approx(wanted, abs=tolerances.SIGMA_ATOL)
    assert learning_rates(3) == whole[3:]


def test_schedule_errors_name_what_is_known() -> None:
    optimizer = torch.optim.SGD([param(1.0)], lr=1.0)
    with pytest.raises(ValueError, match="lr_scheduler='polynom': must be one of constant, constant_with_warmup"):
        make_scheduler("polynom", optimizer, 4, {})
    with pytest.raises(ValueError, match=r"lr_scheduler_params=\{'speed': 1\}: cosine does not take them"):
        make_scheduler("cosine", optimizer, 4, {"speed": 1})


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


def test_rotation_keeps_the_newest_and_never_the_final(tmp_path: Path) -> None:
    names = [save_name("run", step) for step in (500, 1000, 1500)] + [
        save_name("run", None),
        "run_two_000000001.safetensors",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert names[0] == "run_000000500.safetensors"
    assert [path.name for path in rotate_saves(tmp_path, "run", 2)] == [names[0]]
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
    assert rotate_saves(tmp_path, "run", 2) == []


def test_metadata_values_are_strings_and_placeholders_are_filled() -> None:
    meta = lora_metadata("shirt", step=3, epoch=1, meta={"name": "[name]", "version": "1.0", "tags": ["a"]})
    assert all(isinstance(value, str) for value in meta.values())
    assert (meta["name"], meta["version"], json.loads(meta["tags"])) == ("shirt", "1.0", ["a"])
    assert json.loads(meta["software"])["name"] == "coat-flux"
    assert "ss_tag_frequency" not in meta


def test_save_dtypes() -> None:
    assert [save_dtype(name) for name in ("fp16", "bf16", "float32")] == [torch.float16, torch.bfloat16, torch.float32]
    with pytest.raises(ValueError, match=r"save\.dtype='int8': must be one of float16"):
        save_dtype("int8")


def test_launch_of_several_that_started_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    _check_launch(1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    _check_launch(2)
    with pytest.raises(RuntimeError, match=r"starts only one.*--multi_gpu --num_processes N"):
        _check_launch(1)


def test_a_saved_path_that_the_config_forbids_is_said_and_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    config = COATConfig.from_dict({"activation": {"linear_granularity": "per_row"}})
    pick = GemmPick({}, config, lambda *a: ())
    pick.keep("per_tensor")
    assert "per_tensor" in caplog.text
    assert pick.choose((torch.ones(1),)).gemm == "per_row"
    again = GemmPick({}, config, lambda *a: ())
    again.keep("bf16")
    assert again.choose((torch.ones(1),)).gemm == "bf16"


def test_weights_come_only_from_safetensors(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"vae/ has its weights only as a pickle \(diffusion_pytorch_model\.bin\)"):
        load_encoders(str(tmp_path), torch.bfloat16)


def test_a_report_that_the_disk_refuses_is_given_up_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    table = GrowingTable(tmp_path / "metrics.csv", ("step", "loss", "skipped"), 0, said.append)
    table.append(["1", "0.5", "0"])
    table.append(["2", "0.5", "0"])
    table.close()
    table = GrowingTable(tmp_path / "metrics.csv", ("step", "loss", "skipped", "new"), 1, said.append)
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "step,loss,skipped,new\n1,0.5,0,\n"
    os.close(table._file.fileno())
    table.append(["2", "0.5", "0", "0"])
    table.append(["3", "0.5", "0", "0"])
    assert len(said) == 1
    assert "metrics.csv: cannot be written" in said[0]
    phases = PhaseTracker(torch.device("cpu"), tmp_path / "metrics.csv" / "memory.json")
    phases.write()
    assert phases.path is None
    assert "memory.json: cannot be written" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that must be missing")
def test_missing_gpu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers("cuda:0")
    assert workers.device == torch.device("cpu")
    assert "device=cuda:0: torch finds no such device here; training on the CPU" in caplog.text
    assert (workers.rank, workers.size, workers.is_main) == (0, 1, True)
    workers.close()
