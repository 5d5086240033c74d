"""Whole blocks and optimizer steps through the Triton kernels, in the interpreter, against the operators' references.

What an operator is given on CUDA, its launcher is given here: strides, dtypes and absent tensors as the flow has them.
Each result must be laid out as the operator's fake says, and share no memory with an argument or another result.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from coat_core.activation import Saving
from coat_core.config import FP8LinearConfig
from coat_core.granularity import Granularity, Storage
from coat_core.ops import dispatch
from coat_flux.blocks.fused.chooser import fused_block
from tests.autograd.test_fused_flow import arguments, blocks, gradients
from tests.helpers.asserts import assert_sqnr
from tests.helpers.families import FAMILIES, made, results
from tests.helpers.flux import coat_flux_model
from tests.helpers.operators import check_layout
from tests.tolerances import KERNEL_FLOW_FLOOR_DB

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs kernels where there is no GPU"),
]


class Kernels:
    """Sends operators on CPU tensors to their launchers, and counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._undo = ExitStack()

    def __enter__(self) -> Kernels:
        library = self._undo.enter_context(torch.library._scoped_library("coat", "IMPL"))
        for name in dispatch.launchers:
            library.impl(name, self._counted(name, dispatch.launcher_of(name)), "CPU")
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def _counted(self, name: str, launch: Any) -> Any:
        def run(*args: Any) -> Any:
            self.calls[name.removeprefix("coat::")] += 1
            results = launch(*args)
            if results is not None:
                check_layout(dispatch.launchers[name], args, results)
            return results

        return run


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("double", {}),
        ("single", {"linear_granularity": "per_tensor", "format": "e5m2", "nonlinear_granularity": "per_tensor"}),
        ("single", {"attention": "bf16", "grad_format": "e4m3"}),
    ],
    ids=["double", "e5m2, packed per tensor", "attention bf16"],
)
def test_a_block_by_kernels_is_the_block_by_references(kind: str, activation: dict[str, Any]) -> None:
    coat = {"memory": {"checkpointing": "none"}, "activation": activation}
    model, _, _ = coat_flux_model(coat, dtype=torch.float32)
    block = blocks(model)[kind]
    granularity = Granularity(activation.get("nonlinear_granularity", "per_group"), 32)
    packing = Saving(Storage(activation.get("format", "e4m3"), granularity), activation.get("attention", "fp8"))
    args = arguments(model, batch=1, text=5, image=11)
    expected = gradients(fused_block(block, packing), block, args)
    with Kernels() as kernels:
        found = gradients(fused_block(block, packing), block, args)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert_sqnr(wanted, found[name], KERNEL_FLOW_FLOOR_DB)
    own = "qkv_rope_backward" if kind == "double" else "qkv_mlp_backward"
    shared = ("norm_modulate_quantize", "qkv_rope", "mlp_activation_down", "gated_sum", "lora_up_gradients")
    for name in (*shared, "mlp_down_gradient", own):
        assert kernels.calls[name] > 0


OF_EVERY_FAMILY = ("norm_modulate_quantize", "mlp_activation_down", "gated_sum", "mlp_down_gradient")
BACKWARD = {  # z-image: RMSNorm on both sides of linears; flux2: one linear makes q, k, v and both halves of SwiGLU
    "z-image": ("norm_modulate_backward", "gated_sum_backward", "qkv_rope_backward", "mlp_activation_backward"),
    "flux2 single": ("qkv_mlp_backward",),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_other_models_blocks_by_kernels_are_those_by_references(name: str) -> None:
    if name not in FAMILIES:
        pytest.skip("this diffusers has no FLUX.2")
    hidden = 48 if name == "z-image" else 64
    of = made(name, hidden=hidden, tokens=(3, 7), fp8=FP8LinearConfig(), adapters="toolkit")
    form = fused_block(of.block, Saving(Storage(granularity=Granularity("per_group", 16))))
    expected = results(form, of)
    with Kernels() as kernels:
        actual = results(form, of)
    for result, wanted in expected.items():
        assert_sqnr(wanted, actual[result], KERNEL_FLOW_FLOOR_DB)
    assert all(kernels.calls[operator] for operator in (*OF_EVERY_FAMILY, *BACKWARD[name]))
