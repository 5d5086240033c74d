"""Whole blocks and optimizer steps through the Triton kernels, in the interpreter, against the operators' references.

Each result must be laid out as the operator's fake says, and share no memory with an argument or another result.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from coat_core.activation import Saving
from coat_core.granularity import Granularity, Storage
from coat_core.ops import dispatch
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.config.coat import COATConfig
from tests.helpers.asserts import assert_sqnr
from tests.helpers.families import FAMILIES, made, results
from tests.helpers.operators import check_layout
from tests.tolerances import KERNEL_FLOW_FLOOR_DB

pytestmark = [pytest.mark.triton, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")]


PACKED = Saving(Storage(granularity=Granularity("per_group", 16)))


@contextmanager
def kernels() -> Iterator[Counter[str]]:
    """Sends operators on CPU tensors to their launchers, and counts."""
    calls: Counter[str] = Counter()

    def counted(name: str, launch: Any) -> Any:
        def run(*args: Any) -> Any:
            calls[name.removeprefix("coat::")] += 1
            results = launch(*args)
            if results is not None:
                check_layout(dispatch.launchers[name], args, results)
            return results

        return run

    with torch.library._scoped_library("coat", "IMPL") as library:
        for name in dispatch.launchers:
            library.impl(name, counted(name, dispatch.launcher_of(name)), "CPU")
        yield calls


OF_EVERY_FAMILY = ("norm_modulate_quantize", "mlp_activation_down", "gated_sum", "mlp_down_gradient")
OF_FLUX1 = ("qkv_rope", "lora_up_gradients")
E5M2 = Saving(Storage("e5m2", Granularity("per_tensor")))
IN_E5M2 = {"linear_granularity": "per_tensor", "format": "e5m2"}
IN_INT8 = {"format": "int8", "grad_format": "int8"}
BF16_ATTENTION = replace(PACKED, attention="bf16")
Z_IMAGE = ("norm_modulate_backward", "gated_sum_backward", "qkv_rope_backward", "mlp_activation_backward")
CASES = [  # z-image: RMSNorm on both sides of linears; flux2: one linear makes q, k, v and both halves of SwiGLU
    ("flux double", {}, PACKED, (*OF_FLUX1, "qkv_rope_backward")),
    ("flux single", IN_E5M2, E5M2, (*OF_FLUX1, "qkv_mlp_backward")),
    ("flux single", {"grad_format": "e4m3"}, BF16_ATTENTION, (*OF_FLUX1, "qkv_mlp_backward")),
    *((name, IN_INT8, PACKED, (*OF_FLUX1, "int8_mm", "gated_sum_backward")) for name in ("flux double", "flux single")),
    ("z-image", {}, PACKED, Z_IMAGE),
    ("flux2 single", {}, PACKED, ("qkv_mlp_backward",)),
    ("krea2", {}, PACKED, ("qkv_rope", "qkv_rope_backward", "quantize_and_save")),
]


@pytest.mark.parametrize(("name", "activation", "saving", "operators"), CASES)
def test_a_block_by_kernels_is_the_block_by_references(name, activation, saving, operators):
    if name not in FAMILIES:
        pytest.skip("this diffusers has no such block")
    weight = {"format": "int8"} if activation is IN_INT8 else {}
    config = COATConfig.from_dict({"activation": activation, "weight": weight}).linear_config()
    hidden, adapters = (48, "toolkit") if name == "z-image" else (64, "toolkit" if "2" in name else "peft")
    of = made(name, hidden=hidden, tokens=(5, 11), fp8=config, adapters=adapters, batch=1)
    form = fused_block(of.block, saving)
    expected = results(form, of)
    with kernels() as calls:
        actual = results(form, of)
    for result, wanted in expected.items():
        assert_sqnr(wanted, actual[result], KERNEL_FLOW_FLOOR_DB)
    assert all(calls[operator] for operator in (*OF_EVERY_FAMILY, *operators))
