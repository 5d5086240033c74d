"""How exact a linear's products are in each 8-bit format, next to ai-toolkit's convrot8: SQNR in dB.

    python scripts/compare_products.py [--rows 256] [--width 3072] [--ai-toolkit CHECKOUT]

A frozen linear [1024, K] in bf16 reads bf16 x: Gaussian, and with the outliers that transformers have. dy has the same
kinds. Everything runs on a CPU; ai-toolkit's format needs its packages besides ours.

A second table is of a trained weight's gradient, dyᵀ x: of the whole, and of the output feature that lost the most,
which AdamW makes as large as the others. Per output feature is what `wgrad_format` does.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from coat_core import FP8Linear, FP8LinearConfig, sqnr_db
from coat_core.granularity import PER_ROW
from coat_core.int8 import quantize_int8
from coat_core.linear.function import wgrad
from coat_core.quantize import Quantized, quantize

OUTPUTS = 1024
KINDS = ("gauss", "student", "1 % of channels x 30", "3 channels x 100", "after GELU")
FORMATS = {
    "e4m3 per row, dy e5m2": FP8LinearConfig(weight_granularity="per_row"),
    "e4m3 per row, dy e4m3": FP8LinearConfig(weight_granularity="per_row", grad_format="e4m3"),
    "int8 rotated, dy int8": FP8LinearConfig(weight_format="int8", input_format="int8", grad_format="int8"),
    "int8 rotated, dy bf16": FP8LinearConfig(weight_format="int8", input_format="int8", grad_format="bf16"),
}
WGRAD = {
    "dy as it is": FP8LinearConfig(),
    "dy e4m3 per output feature": FP8LinearConfig(wgrad_format="e4m3"),
    "dy e5m2 per output feature": FP8LinearConfig(wgrad_format="e5m2"),
}
Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def tokens(kind: str, rows: int, width: int, seed: int) -> Tensor:
    """Draw x [rows, width], bf16."""
    torch.manual_seed(seed)
    x, channels = torch.randn(rows, width), torch.randperm(width)
    if kind == "student":
        x = torch.distributions.StudentT(3.0).sample((rows, width))
    elif kind == "1 % of channels x 30":
        x[:, channels[: width // 100]] *= 30
    elif kind == "3 channels x 100":
        x[:, channels[:3]] *= 100
    elif kind == "after GELU":
        x[:, channels[: width // 100]] += 10
        x = torch.nn.functional.gelu(1.5 * x)
    return x.to(torch.bfloat16)


def _through(linear: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = linear(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear


def ours(config: FP8LinearConfig) -> Run:
    """Y and dx of an FP8Linear."""
    return lambda weight, x, dy: _through(FP8Linear.from_linear(_linear(weight), config), x, dy)


def unrotated(weight: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 per row as it is."""
    w, scale = quantize_int8(weight, 1)[:2]
    codes, values = (quantize_int8(given, 1, factors) for given, factors in ((x, None), (dy, scale.view(-1))))
    return codes.dequantize() @ (w * scale).t(), values.dequantize() @ w.to(torch.float32)


def convrot8(weight: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """ai-toolkit's, as in training."""
    from toolkit.util.ostris_quant import convert_linear_to_ostris, get_ostris_quantizer

    linear = _linear(weight)
    convert_linear_to_ostris(linear, get_ostris_quantizer("convrot8"))
    return _through(linear, x, dy)


def weight_gradients(rows: int, width: int) -> None:
    """Print the table of dW: whole / lowest output feature; x is e4m3 with one scale per token."""

    def per_tensor(x: Quantized, dy: Tensor, fmt: str) -> Tensor:
        return quantize(dy.float() * x.scale, fmt).dequantize().t() @ x.codes.float()

    ways: dict[str, Callable[[Quantized, Tensor], Tensor]] = {
        name: lambda x, dy, config=config: wgrad(dy, x, config) for name, config in WGRAD.items()
    }
    for fmt in ("e4m3", "e5m2"):
        ways[f"dy {fmt} per tensor"] = functools.partial(per_tensor, fmt=fmt)
    print(f"\n| dW, dB | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 1)}")
    for name, way in ways.items():
        cells = []
        for kind in KINDS:
            x, dy = tokens(kind, rows, width, 1), tokens(kind, rows, OUTPUTS, 2)
            exact, found = dy.double().t() @ x.double(), way(quantize(x, "e4m3", PER_ROW), dy)
            lowest = min(sqnr_db(a, b) for a, b in zip(exact, found, strict=True))
            cells.append(f"{sqnr_db(exact, found):.1f} / {lowest:.1f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print both tables; the first: forward / dgrad."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="tokens")
    parser.add_argument("--width", type=int, default=3072, help="K")
    parser.add_argument("--ai-toolkit", type=Path, metavar="CHECKOUT", help="compare its convrot8, too")
    options = parser.parse_args()
    runs: dict[str, Run] = {name: ours(config) for name, config in FORMATS.items()} | {"int8 as it is": unrotated}
    if options.ai_toolkit is not None:
        sys.path.insert(0, str(options.ai_toolkit))
        runs["convrot8"] = convrot8
    torch.manual_seed(0)
    weight = (torch.randn(OUTPUTS, options.width) / options.width**0.5).to(torch.bfloat16)
    print(f"| forward / dgrad, dB | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 1)}")
    for name, run in runs.items():
        cells = []
        for kind in KINDS:
            x, dy = tokens(kind, options.rows, options.width, 1), tokens(kind, options.rows, OUTPUTS, 2)
            exact = x.double() @ weight.double().t(), dy.double() @ weight.double()
            found = run(weight, x, dy)
            cells.append(" / ".join(f"{sqnr_db(a, b):.1f}" for a, b in zip(exact, found, strict=True)))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    weight_gradients(options.rows, options.width)


if __name__ == "__main__":
    main()
