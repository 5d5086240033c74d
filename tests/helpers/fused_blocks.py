"""What tests of fused blocks assert, whatever adapters are on them."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coat_core.activation import Saving
from coat_core.quantize import sqnr_db
from coat_flux.blocks.fused.chooser import fused_block
from tests.helpers.families import Made, largest_difference
from tests.helpers.saved_tensors import recording_fused
from tests.tolerances import ARCH_GRADIENT_COSINE, BLOCK_GRADIENT_FLOOR_DB, SMALL_BLOCK_GRADIENT_FLOOR_DB


def assert_as_own_code(of: Made, rtol: float, *case: object) -> None:
    """Outputs and gradients of the fused block are those of the block's own code."""
    error, worst = largest_difference(of)
    assert error < rtol, (*case, worst)


def assert_gradients_near(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Adapters' gradients, from codes, are within the bounds of FLUX.1: the lowest, the median, and all together."""
    decibels = [float(sqnr_db(wanted, found[key])) for key, wanted in expected.items()]
    assert min(decibels) > SMALL_BLOCK_GRADIENT_FLOOR_DB
    assert statistics.median(decibels) > BLOCK_GRADIENT_FLOOR_DB
    norms = {key: wanted.double().norm() for key, wanted in expected.items()}
    flat = [torch.cat([x[key].double().flatten() / norms[key] for key in norms]) for x in (expected, found)]
    assert torch.nn.functional.cosine_similarity(*flat, dim=0) > ARCH_GRADIENT_COSINE


def kept_per_element(of: Made, elements: int) -> float:
    """Bytes that a pass of the fused block keeps for backward, by `elements` of its inputs."""
    form: Callable[..., Any] = fused_block(of.block, Saving())
    with recording_fused() as kept:
        form(*of.args)
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for _, tensors in kept for x in tensors}
    return sum(storages.values()) / elements
