"""What is read once and becomes both a linear's input and what is saved: the operator, and its Triton kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import per_group
from coat_core.ops.quantize import quantize_and_save
from tests.helpers.operators import check_operator
from tests.helpers.rows import KINDS, SPECS, assert_codes_of, assert_saved, rows_of_kind

CPU = torch.device("cpu")
HOW = [(*spec, 128, "e4m3", 16) for spec in SPECS] + [
    ("e4m3", "per_row", 128, "none", 128),
    ("none", "none", 0, "e5m2", 128),
]


def assert_both(x: Tensor, found: tuple[Tensor, ...], how: tuple[str, str, int, str, int]) -> None:
    """Assert that these are the codes of x to the bit."""
    fmt, granularity, group_size_in, *saved = how
    if granularity == "per_group":
        assert_saved(x, *found[:2], fmt, group_size_in)
    else:
        assert_codes_of(x.contiguous(), *found[:2], "e4m3" if fmt == "none" else fmt, granularity)
    assert_saved(x, *found[2:], *saved)


@pytest.mark.parametrize("how", [*HOW, ("e4m3", "per_group", 128, "e4m3", 16)], ids=str)
def test_both_are_the_codes_of_x(how: tuple[str, str, int, str, int]) -> None:
    x = rows_of_kind("slice", (2, 7, 40)).bfloat16()
    found = quantize_and_save(x, *how)
    assert_both(x, found, how)
    declared = declarations["coat::quantize_and_save"](found, x, *how)
    assert [cast.granularity.name for cast in declared] == [g for g in (how[1], "per_group") if g != "none"][
        : len(declared)
    ]
    assert len(declared) == (how[1] != "none") + (how[3] != "none")
    if how[3] != "none":
        assert declared[-1].granularity == per_group(how[4])


def test_the_operator_keeps_torch_library_rules() -> None:
    for how in HOW:
        check_operator(quantize_and_save, (torch.randn(2, 3, 40).transpose(0, 1).bfloat16(), *how))


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", [*KINDS, "of an image", "heads"])
@pytest.mark.parametrize("how", [*HOW, ("e4m3", "per_group", 128, "e4m3", 16)], ids=str)
def test_quantize_and_save_kernel(kind: str, how: tuple[str, str, int, str, int], device: torch.device) -> None:
    from coat_core.ops.quantize_kernel import quantize_and_save as kernel

    for shape in ((2, 7, 48), (1, 7, 40), (3, 5, 130), (1, 3, 2100), (5, 1)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = rows_of_kind(kind, shape).to(device, dtype)
            if kind == "of an image":  # text's rows in front of each image's
                x = torch.randn(shape[0], shape[1] + 3, *shape[2:]).to(device, dtype)[:, 3:]
            elif kind == "heads":  # [B, S, D] as attention leaves it, [B, H, S, d] in memory
                x = torch.randn(2, 3, 7, 16).to(device, dtype).transpose(1, 2).flatten(2)
            assert_both(x, kernel(x, *how), how)


@pytest.mark.triton
def test_rows_too_wide_for_a_program_are_refused(device: torch.device) -> None:
    from coat_core.ops.quantize_kernel import quantize_and_save as kernel

    with pytest.raises(ValueError, match="rows of 16385: the Triton kernel holds at most 16384"):
        kernel(torch.zeros(1, 16385, device=device), "e4m3", "per_row", 128, "none", 128)
