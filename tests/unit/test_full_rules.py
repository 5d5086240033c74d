"""Jobs without `network:`: what holds of the config then, and what is refused, with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coat_core.linear.module import FP8TrainableLinear
from coat_core.optim import FP8AdamW
from coat_flux.blocks.gemms import set_transposed, transposed_bytes
from coat_flux.blocks.lookup import trained_names
from coat_flux.config.check import check_job_dict
from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.trainers.standalone.full import UpdateInBackward
from tests.helpers.engine_job import engine_job


def job(changes: dict[str, Any] | None = None, network: bool = False, **coat: Any) -> dict[str, Any]:
    raw = engine_job("run", model=Path("model"), images=Path("photos"), out=Path("out"), coat=coat)
    process = raw["config"]["process"][0]
    if not network:
        del process["network"], process["save"]
    for key, value in (changes or {}).items():
        block, _, name = key.rpartition(".")
        (process[block] if block else process)[name] = value
    return raw


def test_without_network_the_model_is_trained_and_saved_as_it_is_trained() -> None:
    parsed = JobConfig.from_dict(job())
    assert (parsed.full, parsed.save.dtype) == (True, "bf16")
    coat = parsed.coat
    assert (coat.activation.flow, coat.speed.compile, coat.optimizer.stochastic_rounding) == ("generic", "none", True)
    assert JobConfig.from_dict(job({"train.dtype": "fp32"})).save.dtype == "fp32"
    assert not JobConfig.from_dict(job(optimizer={"stochastic_rounding": False})).coat.optimizer.stochastic_rounding
    lora = JobConfig.from_dict(job(network=True))
    assert (lora.full, lora.coat.activation.flow, lora.coat.optimizer.stochastic_rounding) == (False, "fused", False)
    assert not [item for item in check_job_dict(job({"train.lr": 1e-6})) if "lr" in item.line()]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"memory": {"stream_blocks": 4}}, r"coat\.memory\.stream_blocks=4: streams frozen codes.*write 0, or add net"),
    ({}, {"weight": {"format": "nvfp4"}}, r"coat\.weight\.format='nvfp4': is for frozen weights.*write e4m3"),
    ({}, {"activation": {"flow": "fused"}}, r"coat\.activation\.flow='fused': is for frozen weights.*write generic"),
    ({}, {"speed": {"compile": "blocks"}}, r"coat\.speed\.compile='blocks': is for frozen weights.*write none"),
    ({"model.quantize": True, "model.qtype": "coat_fp8"}, {}, r"model\.quantize=true: quantizes frozen weights"),
    ({"train.optimizer": "prodigy"}, {}, r"train\.optimizer='prodigy': keeps states .* coat_fp8_adamw, adamw"),
    ({"train.optimizer": "adamw", "train.fused_backward": True}, {}, r"train\.fused_backward=true: updates single wei"),
    ({"name": "coat"}, {}, r"name='coat': is also the name of the final model's folder"),
]


@pytest.mark.parametrize(("changes", "coat", "message"), REFUSED, ids=[message[:24] for *_, message in REFUSED])
def test_what_full_fine_tuning_cannot_do_is_refused(
    changes: dict[str, Any], coat: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_dict(job(changes, **coat))


def test_what_a_lora_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.fused_backward=true: is for full fine-tuning"):
        JobConfig.from_dict(job({"train.fused_backward": True}, network=True))
    with pytest.raises(ConfigError, match=r"coat\.include=.*only_if_contains and ignore_if_contains choose its layers"):
        JobConfig.from_dict(job(network=True, include=["*.attn.*"]))
    assert JobConfig.from_dict(job(network=True, include=["*"], exclude=[])).coat.include == ("*",)
    found = check_job_dict(job({"train.fused_backward": True}, network=True), trainer="ai-toolkit")
    assert any("fused_backward=true: the stand-alone trainer's" in item.line() for item in found)


def test_wgrad_format_is_for_trained_weights_with_one_scale_a_row() -> None:
    parsed = JobConfig.from_dict(job(activation={"wgrad_format": "e4m3"}))
    assert parsed.coat.linear_config().wgrad_format == "e4m3"
    with pytest.raises(ConfigError, match=r"wgrad_format='e4m3': is not for int8, nor for linear_granularity: per_gro"):
        JobConfig.from_dict(job(activation={"wgrad_format": "e4m3", "linear_granularity": "per_group"}))
    with pytest.raises(ConfigError, match=r"wgrad_format='e5m2': is for full fine-tuning"):
        JobConfig.from_dict(job(network=True, activation={"wgrad_format": "e5m2"}))


def test_codes_of_trained_weights_are_kept_and_forgotten_as_copies_are() -> None:
    block, x = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), torch.randn(4, 32)
    for linear in block:
        FP8TrainableLinear.from_linear(linear)
    assert transposed_bytes([block]) == 2 * 32 * 64
    expected = block(x)
    assert block[0].trained_codes.codes is None
    set_transposed([block], True)
    assert torch.equal(block(x), expected)
    assert block[0].trained_codes.codes is not None
    set_transposed([block], False)
    assert [linear.trained_codes.codes for linear in block] == [None, None]
    block[1].weight.requires_grad_(False)
    assert transposed_bytes([block]) == 32 * 64


def test_patterns_choose_parameters_and_modules() -> None:
    names = ["a.0.attn.to_q.weight", "a.0.attn.to_q.bias", "a.1.norm.weight", "b.weight"]
    assert trained_names(names, ["*"], []) == names
    assert trained_names(names, ["a.*"], ["*.norm"]) == names[:2]
    assert trained_names(names, ["*.to_q", "b"], ["*.bias"]) == [names[0], names[3]]
    with pytest.raises(ConfigError, match=r"coat\.exclude: 'norm' matches no parameter"):
        trained_names(names, ["*"], ["norm"])
    with pytest.raises(ConfigError, match="nothing of the transformer is left to train"):
        trained_names(names, ["a.*"], ["*"])


def fused(capturable: bool, max_norm: float) -> tuple[list[nn.Parameter], UpdateInBackward, list[str]]:
    params = [nn.Parameter(torch.full((4,), 1.0)) for _ in range(2)]
    begun: list[str] = []
    optimizer = FP8AdamW(params, lr=0.1, weight_decay=0.0, capturable=capturable)
    made = UpdateInBackward(optimizer, params, max_norm, lambda _: None, lambda: begun.append("begun"))
    return params, made, begun


@pytest.mark.parametrize("capturable", [False, True])
def test_each_gradient_is_clipped_by_itself_and_what_is_not_finite_changes_nothing(capturable: bool) -> None:
    params, updates, begun = fused(capturable, 0.5)
    (params[0].sum() * 3).backward()  # an earlier micro-batch: only adds up
    assert params[0].grad is not None
    assert begun == []
    loss = (params[0] * 5).sum() + (params[1] * torch.tensor([1.0, torch.inf, 1.0, 1.0])).sum()
    with updates.updating(torch.zeros(())):
        loss.backward()
    assert [param.grad for param in params] == [None, None]
    assert begun == ["begun"]
    assert torch.all(params[0] < 1.0)
    assert torch.equal(params[1], torch.ones(4))
    assert updates.norm().isinf()
    before = params[0].detach().clone()
    with updates.updating(torch.ones(())):  # the loss was not finite
        params[0].sum().backward()
    assert torch.equal(params[0], before)
    assert updates.norm() == 2.0


def test_clipping_scales_to_the_norm() -> None:
    params, updates, _ = fused(False, 0.5)
    kept: list[torch.Tensor] = []
    step = updates._optimizer.step_parameter
    updates._optimizer.step_parameter = lambda p: (kept.append(p.grad.clone()), step(p))  # type: ignore[method-assign]
    with updates.updating(torch.zeros(())):
        ((params[0] * 3).sum() + params[1].sum() * 1e-3).backward()
    by_size = sorted(kept, key=lambda x: float(x.norm()))
    assert float(by_size[1].norm()) == pytest.approx(0.5, rel=1e-5)
    assert torch.equal(by_size[0], torch.full((4,), 1e-3))
