"""Jobs without `network:`: what holds of the config then, and what is refused, with what to write instead."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coat_core.linear.module import FP8TrainableLinear
from coat_core.optim import FP8AdamW
from coat_flux.blocks.gemms import set_transposed, transposed_bytes
from coat_flux.blocks.models import trained_names
from coat_flux.config.check import check_job_dict
from coat_flux.config.coat import COATConfig
from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig, coat_of_entry
from coat_flux.trainers.full import UpdateInBackward
from tests.helpers.changes import change
from tests.helpers.engine_job import engine_job
from tests.reliability.bad_configs import check_job_file

FUSED = {"train.fused_backward": True}
INT8 = {"format": "int8"}


def job(changes: dict[str, Any] | None = None, network: bool = False, **coat: Any) -> dict[str, Any]:
    raw = engine_job("run", model=Path("model"), images=Path("photos"), out=Path("out"), coat=coat)
    process = raw["config"]["process"][0]
    if not network:
        del process["network"], process["save"]
    change(process, changes or {})
    return raw


def in_force(coat: COATConfig) -> tuple[str, str, bool]:
    return coat.activation.flow, coat.speed.cuda_graphs, coat.optimizer.stochastic_rounding


def test_without_network_the_model_is_trained_and_saved_as_it_is_trained():
    parsed = JobConfig.from_dict(job())
    assert (parsed.full, parsed.save.dtype) == (True, "bf16")
    assert in_force(parsed.coat) == ("generic", "never", True)
    assert JobConfig.from_dict(job({"train.dtype": "fp32"})).save.dtype == "fp32"
    assert not JobConfig.from_dict(job(optimizer={"stochastic_rounding": False})).coat.optimizer.stochastic_rounding
    lora = JobConfig.from_dict(job(network=True))
    assert (lora.full, lora.coat.activation.flow, lora.coat.optimizer.stochastic_rounding) == (False, "fused", False)
    assert not [item for item in check_job_dict(job({"train.lr": 1e-6})) if "lr" in item.line()]
    wgrad = JobConfig.from_dict(job(activation={"wgrad_format": "e4m3"})).coat.linear_config()
    assert wgrad.wgrad_format == "e4m3"
    assert JobConfig.from_dict(job(network=True, include=["*"], exclude=[])).coat.include == ("*",)


BOTH, ALONE, INSIDE = ("standalone", "ai-toolkit"), ("standalone",), ("ai-toolkit",)
FULL, LORA = False, True  # whether there is a network
# trainers, network, changes of the job and of its coat block, and the error
REFUSED: list[tuple[tuple[str, ...], bool, dict[str, Any], dict[str, Any], str]] = [
    (BOTH, FULL, {}, {"memory": {"stream_blocks": 4}}, r"coat\.memory\.stream_blocks=4: .*write 0"),
    (BOTH, FULL, {}, {"weight": {"format": "nvfp4"}}, r"coat\.weight\.format='nvfp4': .*write e4m3"),
    (BOTH, FULL, {"train.optimizer": "adamw", "train.fused_backward": True}, {}, r"train\.fused_backward=true"),
    (BOTH, FULL, {}, {"activation": {"wgrad_format": "e4m3", **INT8}, "weight": INT8}, "wgrad_format='e4m3'.*int8"),
    (ALONE, FULL, {"train.optimizer": "prodigy"}, {}, r"train\.optimizer='prodigy': .* coat_fp8_adamw, adamw"),
    (ALONE, FULL, {"name": "coat"}, {}, "name='coat'"),
    (INSIDE, FULL, {"name": "conf"}, {}, "name='conf': .* write a longer one"),
    (INSIDE, FULL, {"model.arch": "qwen_image"}, {}, r"model\.arch='qwen_image': .* arch: flux, or add"),
    (INSIDE, FULL, {"save": {"dtype": "float16"}}, {}, r"save\.dtype='float16': .* write bf16"),
    (INSIDE, FULL, {"train.ema_config": {"use_ema": True}}, {}, r"train\.ema_config=.* write use_ema: false"),
    (INSIDE, FULL, {**FUSED, "train.loss_type": "mean_flow"}, {}, "loss_type='mean_flow': .* write mse"),
    (ALONE, LORA, {"network": {"type": "lokr", "dropout": 0.1}}, {}, r"network\.dropout=0\.1: .*; remove it"),
    (BOTH, LORA, {"device": "cuda:0,cuda:1"}, {}, r"device='cuda:0,cuda:1': .*one GPU.*accelerate launch"),
    (BOTH, LORA, FUSED, {}, r"train\.fused_backward=true: is for full fine-tuning"),
    (BOTH, LORA, {}, {"include": ["*.attn.*"]}, r"coat\.include=.*only_if_contains"),
    (INSIDE, LORA, {"train.fused_backward": "yes"}, {}, "fused_backward='yes'"),
    (INSIDE, FULL, {**FUSED, "train.optimizer": "adamw", "type": "sd_trainer"}, {}, "type: coat_flux_trainer"),
]


def errors(trainer: str, network: bool, changes: dict[str, Any], num_processes: int = 1, **coat: Any) -> str:
    if trainer == "ai-toolkit":
        changes = {"train.noise_scheduler": "flowmatch", **changes}
    items = check_job_dict(job(changes, network, **coat), trainer=trainer, num_processes=num_processes)
    return "\n".join(item.line() for item in items if item.severity == "error")


@pytest.mark.parametrize(("trainers", "network", "changes", "coat", "message"), REFUSED)
def test_what_cannot_be_trained_is_refused(trainers, network, changes, coat, message):
    for trainer in trainers:
        assert re.search(message, errors(trainer, network, changes, **coat)), trainer


def test_inside_ai_toolkit_a_job_without_network_is_as_in_the_stand_alone_trainer():
    assert errors("ai-toolkit", FULL, FUSED, include=["*.attn.*"], exclude=["*.bias"]) == ""
    assert errors("ai-toolkit", FULL, {"save": {"dtype": "bf16"}}, activation={"wgrad_format": "e4m3"}) == ""
    shipped = Path(__file__).parents[2] / "configs" / "flux_full_80gb.yaml"
    assert check_job_file(shipped, trainer="ai-toolkit") == check_job_file(shipped) == []
    assert "several processes train a network (a LoRA)" in errors("ai-toolkit", FULL, {}, num_processes=2)
    entry = job(activation={"format": "e4m3"})["config"]["process"][0]
    assert in_force(coat_of_entry(entry, "f.yaml")) == ("generic", "never", True)
    assert coat_of_entry(entry | {"network": {"type": "lora"}}, "f.yaml").activation.flow == "fused"


def test_codes_of_trained_weights_are_kept_and_forgotten_as_copies_are():
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


def test_patterns_choose_parameters_and_modules():
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
    return params, UpdateInBackward(optimizer, params, max_norm, lambda: begun.append("begun")), begun


@pytest.mark.parametrize("capturable", [False, True])
def test_each_gradient_is_clipped_by_itself_and_what_is_not_finite_changes_nothing(capturable):
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
    assert updates.norm.isinf()
    before = params[0].detach().clone()
    with updates.updating(torch.ones(())):  # the loss was not finite
        params[0].sum().backward()
    assert torch.equal(params[0], before)
    assert updates.norm == 2.0


def test_clipping_scales_to_the_norm():
    params, updates, _ = fused(False, 0.5)
    gradients: dict[int, torch.Tensor] = {}
    updates._optimizer.step_parameter = lambda p: gradients.update({id(p): p.grad.clone()})  # type: ignore[method-assign]
    with updates.updating(torch.zeros(())):
        ((params[0] * 3).sum() + params[1].sum() * 1e-3).backward()
    torch.testing.assert_close(gradients[id(params[0])], torch.full((4,), 0.25), rtol=1e-5, atol=0)
    assert torch.equal(gradients[id(params[1])], torch.full((4,), 1e-3))
