"""NVFP4 weights decoded to FP8: the kernel against the reference, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core import nvfp4
from coat_core.ops.nvfp4 import decode_nvfp4
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator, reference


def case(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes and block scales of all kinds; no E4M3 number is NaN in a weight that was quantized."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8)
    scales[0], codes[-1] = 1, 0
    return codes, scales


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (3, 128), (32, 144), (48, 272), (70, 64)])
def test_kernel_is_the_reference(n: int, k: int, transposed: bool, device: torch.device) -> None:
    from coat_core.ops.nvfp4_kernel import decode_nvfp4 as launcher

    codes, scales = (x.to(device) for x in case(n, k))
    expected = reference(decode_nvfp4, codes, scales, transposed)
    assert_bitwise(launcher(codes, scales, transposed).cpu(), expected)
    strided = torch.stack([codes, codes], dim=-1)[..., 0]
    assert_bitwise(launcher(strided, scales, transposed).cpu(), expected)


@pytest.mark.triton
def test_the_table_has_every_code_of_every_scale(device: torch.device) -> None:
    from coat_core.ops.nvfp4_kernel import decode_nvfp4 as launcher

    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8).expand(126, 16)).to(device)
    scales = torch.arange(1, 127, dtype=torch.uint8, device=device)[:, None]
    assert_bitwise(launcher(codes, scales, False).cpu(), reference(decode_nvfp4, codes, scales, False))


@pytest.mark.parametrize("transposed", [False, True])
def test_operator_passes_opcheck(transposed: bool) -> None:
    check_operator(decode_nvfp4, (*case(32, 48), transposed))
