"""Frozen weights, measured where they become codes: later there is no original to compare with.

The four numbers stay with the layer as one text: ai-toolkit stores texts of a layer beside its codes when it keeps a
quantized model, so that they come back with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.granularity import PER_ROW, PER_TENSOR
from coat_core.linear.module import load_weight

from .measure import Measures, measure_cast, sampled
from .records import WEIGHT, Row, merged

__all__ = ["note_weight", "weight_rows"]

ATTRIBUTE = "coat_weight_precision"


@torch.no_grad()
def note_weight(module: nn.Module, weight: Tensor, config: FP8LinearConfig) -> None:
    """Measure a weight that was just stored; one on the meta device, which plans are made with, has nothing to measure.

    Args:
        module: holds the codes.
        weight: the original [N, K].
        config: of the layer.
    """
    if weight.is_meta:
        return
    codes, scale = load_weight(module, config)
    granularity = PER_ROW if config.weight_granularity == "per_row" else PER_TENSOR
    rows = sampled(weight.detach().to(codes.device), codes, scale, granularity)
    found = measure_cast(*rows, granularity).tolist()
    setattr(module, ATTRIBUTE, " ".join(map(repr, found)))


def weight_rows(model: nn.Module) -> list[Row]:
    """Rows of all weights of a model that were measured."""
    found = []
    for name, module in model.named_modules():
        text = vars(module).get(ATTRIBUTE)
        if text is not None:
            measures = Measures(*map(float, text.split()))
            elements = module.get_buffer("weight_codes").numel()
            found.append((name.removesuffix(".base_layer"), WEIGHT, elements, measures))
    return merged(0, found)
