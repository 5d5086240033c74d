"""How exact frozen weights are in each format, next to NF4 and to ai-toolkit's own: SQNR in dB, bits per weight.

    python scripts/compare_weight_formats.py [--rows 1024] [--low-rank 16 32] [--ai-toolkit CHECKOUT]

Weights of FLUX.1's widths: Gaussian, Student's t with 4 degrees of freedom, and Gaussian with 1 % of the columns 30
times as large. Everything runs on a CPU; ai-toolkit's formats need its packages besides ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from coat_core import FP8LinearConfig, quantize, sqnr_db
from coat_core.granularity import PER_ROW
from coat_core.linear.weight import quantize_weight, stored_bytes

WIDTHS = (3072, 12288, 15360)  # K of FLUX.1's linears
# QLoRA (arXiv 2305.14314), appendix E
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
Back = Callable[[Tensor], Tensor]


def weights(kind: str, rows: int, width: int) -> Tensor:
    """Draw W [rows, width]."""
    torch.manual_seed(0)
    if kind == "student":
        return 0.02 * torch.distributions.StudentT(4.0).sample((rows, width))
    found = 0.02 * torch.randn(rows, width)
    if kind == "outlier columns":
        found[:, torch.randperm(width)[: width // 100]] *= 30
    return found


def by_format(name: str) -> Back:
    """What comes back of a weight that is stored in one of our formats."""
    return lambda weight: quantize_weight(weight, FP8LinearConfig(weight_format=name)).dequantize()


def by_nf4(weight: Tensor) -> Tensor:
    """NF4 with a scale in fp32 for each 64; bitsandbytes' second quantization of the scales is left out."""
    blocks, numbers = weight.unflatten(-1, (-1, 64)), torch.tensor(NF4)
    scale = blocks.abs().amax(-1, keepdim=True)
    halfway = (numbers[1:] + numbers[:-1]) / 2
    return (numbers[torch.bucketize(blocks / scale, halfway)] * scale).flatten(-2)


def with_low_rank(name: str, rank: int) -> Back:
    """The same with the largest singular directions apart, in bf16."""

    def back(weight: Tensor) -> Tensor:
        u, s, v = torch.svd_lowrank(weight, rank + 8, niter=4)
        branch = (u[:, :rank] * s[:rank]).bfloat16().float() @ v[:, :rank].bfloat16().float().t()
        return branch + by_format(name)(weight - branch)

    return back


def by_ai_toolkit(qtype: str) -> Back:
    """One of ai-toolkit's own, in the basis of x."""
    from toolkit.util.ostris_quant import convert_linear_to_ostris, get_ostris_quantizer

    def back(weight: Tensor) -> Tensor:
        n, k = weight.shape
        linear = nn.Linear(k, n, bias=False)
        linear.weight.data = weight.clone()
        convert_linear_to_ostris(linear, get_ostris_quantizer(qtype))
        backend = linear.ostris_quantizer
        return getattr(backend, "dequantize_folded", backend.dequantize)(linear).float()

    return back


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="output features of each weight")
    parser.add_argument("--low-rank", type=int, nargs="*", default=[], metavar="R", help="ranks of a branch in bf16")
    parser.add_argument("--ai-toolkit", type=Path, metavar="CHECKOUT", help="compare its convrot4 and convrot8, too")
    options = parser.parse_args()
    kinds = ("gauss", "student", "outlier columns")
    formats: dict[str, tuple[float, Back]] = {
        name: (8 * stored_bytes(3072, 3072, FP8LinearConfig(weight_format=name)) / 3072**2, by_format(name))
        for name in ("e4m3", "nvfp4")
    }
    formats["e4m3 per row"] = 8.01, lambda weight: quantize(weight, "e4m3", PER_ROW).dequantize()
    formats["nf4"] = 4.5, by_nf4
    for rank in options.low_rank:
        bits = formats["nvfp4"][0] + 16 * rank * 2 / 3072
        formats[f"nvfp4 + rank {rank}"] = bits, with_low_rank("nvfp4", rank)
    if options.ai_toolkit is not None:
        sys.path.insert(0, str(options.ai_toolkit))
        formats |= {"convrot4": (4.5, by_ai_toolkit("convrot4")), "convrot8": (8.01, by_ai_toolkit("convrot8"))}
    print(f"| format | bits | {' | '.join(f'{kind}, K {k}' for kind in kinds for k in WIDTHS)} |")
    print("|---" * (2 + len(kinds) * len(WIDTHS)) + "|")
    for name, (bits, back) in formats.items():
        found = [sqnr_db(w, back(w)) for kind in kinds for k in WIDTHS for w in [weights(kind, options.rows, k)]]
        print(f"| {name} | {bits:.2f} | {' | '.join(f'{value:.2f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
