"""attach_lora: adapters of PEFT and of ai-toolkit's shape keep one FP8 x per tensor, the right one."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from coat_core.linear import replace_linear_with_fp8
from coat_flux.blocks.lora import OWN, SHARED, attach_lora
from coat_flux.config.coat import COATConfig
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.toolkit_lora import Network
from tests.tolerances import product_floor_db

K, R = 64, 8
COAT = COATConfig.from_dict({"activation": {"linear_granularity": "per_row"}})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(K, K) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(K, K), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return self.to_out(self.to_q(x) + torch.tanh(self.to_k(x)) * self.to_v(x))


def peft_model(base_fp8: bool = True, **lora: Any) -> nn.Module:
    model = Attention().bfloat16()
    if base_fp8:
        replace_linear_with_fp8(model, COAT.linear_config())
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    return get_peft_model(model, LoraConfig(r=R, target_modules=targets, init_lora_weights=False, **lora)).train()


def saved_inputs(run: Any) -> list[Tensor]:
    """FP8 tensors with one row per token that `run` saves."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return [t for t in saved if t.element_size() == 1 and t.ndim == 3]


def some_x() -> Tensor:
    return torch.randn(2, 9, K).bfloat16().requires_grad_()


def test_gradients_are_those_of_plain_adapters_from_the_fp8_input() -> None:
    plain, ours, x = peft_model(), None, some_x()
    ours = copy.deepcopy(plain)
    attach_lora(ours, COAT)
    dy = torch.randn(2, 9, K).bfloat16()
    y, expected = ours(x), plain(x)
    assert_bitwise(y, expected)
    y.backward(dy)
    expected.backward(dy)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if "lora_A" in name:
            assert_sqnr(q.grad, p.grad, product_floor_db("e4m3"))
        elif "lora_B" in name:
            assert_bitwise(p.grad, q.grad)


@pytest.mark.parametrize(
    ("base_fp8", "lora", "group"),
    [(False, {}, OWN), (True, {"lora_dropout": 0.5}, OWN), (True, {"use_dora": True}, OWN), (True, {}, SHARED)],
    ids=["plain base", "dropout", "dora", "vanilla"],
)
def test_who_shares_and_who_does_not(base_fp8: bool, lora: dict[str, Any], group: str) -> None:
    model = peft_model(base_fp8, **lora)
    assert list(attach_lora(model, COAT).values()) == [group] * 4
    if group == SHARED:
        inputs = saved_inputs(lambda: model(some_x()))
        assert len({t.untyped_storage().data_ptr() for t in inputs}) == 2  # one for q, k, v, one for to_out
    model(some_x()).square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.isfinite().all() for g in gradients)


def toolkit_pair() -> tuple[nn.Module, Network]:
    model = replace_linear_with_fp8(Attention().bfloat16(), COAT.linear_config()).requires_grad_(False)
    return model, Network([module for module in model.modules() if isinstance(module, nn.Linear)], R)


@pytest.mark.parametrize("weakly", [False, True])
def test_ai_toolkits_adapters_share_with_their_base_too(weakly: bool) -> None:
    """Its newer versions hold a weak reference to the base in place of the list."""
    model, network = toolkit_pair()
    for lora in network.unet_loras if weakly else ():
        lora.orig_module_ref = weakref.ref(lora.org_module[0])
        del lora.org_module
    assert attach_lora(network, COAT) == {f"unet_loras.{i}": SHARED for i in range(4)}
    inputs = saved_inputs(lambda: model(some_x()))
    assert len(inputs) == 4
    assert len({t.untyped_storage().data_ptr() for t in inputs}) == 2


def test_a_convolutions_adapter_is_skipped_by_name() -> None:
    _, network = toolkit_pair()
    network.unet_loras[0].lora_down = nn.Conv2d(K, R, 1, bias=False)
    network.unet_loras[1].lora_down = nn.Linear(K, R)
    inputs = attach_lora(network, COAT)
    assert inputs["unet_loras.0"] == "its down projection is a Conv2d"
    assert inputs["unet_loras.1"] == "its down projection is a Linear"


def test_without_an_adapter_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="Attention: no LoRA adapter found; attach after the LoRA network is made"):
        attach_lora(Attention(), COAT)
