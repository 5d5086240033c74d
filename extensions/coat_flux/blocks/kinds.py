"""Kinds of tensors a FLUX block saves for backward, read from its autograd graph, for `plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coat_core.activation.packing import ExactTensor

KINDS = (
    "modulation", "inputs of norms", "LoRA inputs", "LoRA middles", "q, k, v, out", "statistics", "inputs of gates",
    "MLP before GELU", "weights cast at each use", "inputs of trained linears",
)  # fmt: skip
MODULATION, NORMS, INPUTS, MIDDLES, ATTENTION, STATISTICS, GATES, MLP, WEIGHTS, LINEARS = KINDS
FUSED_KINDS = {
    "x": NORMS,
    "h": MIDDLES,
    "mlp": MLP,
    "result": GATES,
    "qkv": ATTENTION,
    "out": ATTENTION,
    "statistics": STATISTICS,
}  # by the last part of the name
NODE_KINDS = {"Gelu": MLP, "_LinearWithFP8Input": INPUTS, "NativeDropout": INPUTS, "_FrozenLinear": WEIGHTS}


def saved_tensors(outputs: tuple[Tensor, ...], rank: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the graph above `outputs` keeps, with its kind; of a packed one, codes and scales."""
    nodes: dict[Any, None] = dict.fromkeys(x.grad_fn for x in outputs if x.requires_grad)
    waiting = list(nodes)
    while waiting:
        node = waiting.pop(0)
        following = [after for after, _ in node.next_functions if after is not None and after not in nodes]
        nodes.update(dict.fromkeys(following))
        waiting += following
        for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
            saved = getattr(node, name)
            for i, item in enumerate(saved if isinstance(saved, list | tuple) else (saved,)):
                data = item.data.tensor if isinstance(item.data, ExactTensor) else item.data
                if data is None:
                    continue
                packed = None if isinstance(data, Tensor) else data.storage.quantized
                shape = data.shape if packed is None else data.size
                kind = _kind_of(node, name.removeprefix("_raw_saved_"), i, shape, rank)
                yield from ((kind, x) for x in ((data,) if packed is None else (packed.codes, packed.scale)))


def _kind_of(node: Any, name: str, i: int, shape: torch.Size, rank: int) -> str:
    operator = node.name().removesuffix("0").removesuffix("Backward")
    if hasattr(node, "kept_places"):
        kept = next(kept for kept, (start, stop) in node.kept_places.items() if start <= i < stop)
        return FUSED_KINDS.get(kept.split("_")[-1].rstrip("01"), MODULATION)
    if operator == "ScaledDotProductFlashAttention":
        return ATTENTION if name in ("query", "key", "value", "output") else STATISTICS
    if operator in ("NativeLayerNorm", "_RMSNorm"):
        return NORMS if name == "input" or (name == "tensors" and i == 0) else STATISTICS
    if operator == "_TrainableLinear":
        return LINEARS if i < 2 else WEIGHTS  # codes and scale of x; then those of W
    if operator in ("Mm", "Addmm", "Bmm"):
        return MIDDLES if shape[-1] == rank else INPUTS
    if operator == "Mul" and len(shape) == 3 and shape[1] > 1:
        before = [after.name() for after, _ in node.next_functions if after is not None]
        return NORMS if "NativeLayerNormBackward0" in before else GATES
    return NODE_KINDS.get(operator, MODULATION)
