"""LoRA gradients with weights, activations and gradients all in NVFP4, emulated: `python scripts/w4a4g4.py`.

The arithmetic of FourTune (https://icml.cc/virtual/2026/poster/64004) as far as it is public: every frozen linear reads
x and dy in E2M1 with 1x16 blocks, a branch of low rank in high precision takes the outliers of W, rotations spread
those of x and dy, and dy is rounded stochastically. One double and one single block of FLUX, inputs and comparison as
in gradient_error.py; adapters multiply in high precision and keep x in NVFP4 for their own gradient. No product of this
package: it decides whether there is to be one.

Shapes: W [N, K], x [..., K], dy [..., N].
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _flux_block import HEAD_DIM, make_model, prepare
from gradient_error import OUTLIERS, RANK, compare, report_row, run_block

from coat_core import nvfp4
from coat_core.formats import E4M3
from coat_core.int8 import rotate, rotation_size
from coat_core.quantize import saturating_cast

LARGEST = nvfp4.MAGNITUDES[-1]


class How(NamedTuple):
    """What is in 4 bits, and what helps it.

    Attributes:
        x: inputs.
        dy: gradients of outputs.
        stochastic: dy is rounded up or down by chance, right on average.
        rotates: x and W along K, dy and W along N.
        rank: of the branch in high precision; 0 is none.
    """

    x: bool = True
    dy: bool = True
    stochastic: bool = False
    rotates: bool = False
    rank: int = 0


SETTINGS = {
    "W": How(x=False, dy=False),
    "W, x": How(dy=False),
    "W, x, dy": How(),
    "W, x, dy stochastic": How(stochastic=True),
    "W, x, dy, low rank": How(rank=32),
    "W, x, dy, rotated": How(rotates=True),
    "W, x, dy, rotated, low rank": How(rotates=True, rank=32),
    "W, x, dy stochastic, rotated, low rank": How(stochastic=True, rotates=True, rank=32),
}


def four_bits(x: Tensor, stochastic: bool = False) -> Tensor:
    """Return x [..., n * 16] as NVFP4 holds it, fp32; block scales are the nearest to amax / 6."""
    blocks = x.detach().to(torch.float32).unflatten(-1, (-1, nvfp4.BLOCK))
    size = blocks.abs()
    amax = size.amax(-1, keepdim=True)
    unit = (amax.amax() / (LARGEST * E4M3.max)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = saturating_cast(amax / (LARGEST * unit), E4M3).to(torch.float32) * unit
    size.div_(torch.where(scale > 0, scale, 1.0))
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    moved = torch.rand_like(size) if stochastic else 0.5
    size.div_(step).add_(moved).floor_().mul_(step).clamp_(max=LARGEST)
    return size.copysign_(blocks).mul_(scale).flatten(-2)


def searched(weight: Tensor) -> Tensor:
    """Return W as `weight.format: nvfp4` stores it, fp32."""
    packed = nvfp4.quantize(weight)
    codes = nvfp4.unpack(packed.codes).unflatten(-1, (-1, nvfp4.BLOCK))
    return nvfp4.decode(codes, packed.block_scales).to(torch.float32).flatten(-2) * packed.scale


class Product(torch.autograd.Function):
    """x Wᵀ with both factors in 4 bits, and dy W likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, across: Tensor, how: How) -> Tensor:
        """Return x Wᵀ; `weight` [N, K] and `across` [K, N] are W in 4 bits, in rotated coordinates."""
        ctx.save_for_backward(across)
        ctx.how, ctx.sizes = how, [rotation_size(n) if how.rotates else 1 for n in weight.shape]
        values = rotate(x, ctx.sizes[1])
        return (four_bits(values) if how.x else values) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx."""
        (across,), (outputs, inputs) = ctx.saved_tensors, ctx.sizes
        values = rotate(grads[0], outputs)
        dy = four_bits(values, ctx.how.stochastic) if ctx.how.dy else values
        return rotate(dy @ across.t(), inputs), None, None, None


class KeptInput(torch.autograd.Function):
    """x Aᵀ of an adapter whose own gradient reads x in 4 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        """Return x Aᵀ."""
        ctx.save_for_backward(x, a)
        return x @ a.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx and dA."""
        x, a = ctx.saved_tensors
        return grads[0] @ a, grads[0].flatten(0, -2).t() @ four_bits(x).flatten(0, -2)


class FourBitLinear(nn.Module):
    """A frozen linear in this arithmetic, made from one in high precision."""

    def __init__(self, linear: nn.Linear, how: How) -> None:
        super().__init__()
        weight = linear.weight.detach().to(torch.float32)
        self.how, self.bias, self.branch = how, linear.bias, None
        if how.rank:
            u, s, v = torch.svd_lowrank(weight, q=how.rank, niter=2)
            self.branch = u * s, v
            weight = weight - self.branch[0] @ v.t()
        n, k = weight.shape
        self.stored = searched(rotate(weight, rotation_size(k) if how.rotates else 1))
        # rotated along N as dy is, it is a second weight in 4 bits; else what is stored, read the other way
        turned = rotate(self.stored.t().contiguous(), rotation_size(n)) if how.rotates and how.dy else None
        self.across = self.stored.t() if turned is None else searched(turned)
        if how.rotates and not how.dy:
            self.across = rotate(self.stored.t().contiguous(), rotation_size(n))

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        values = x.to(torch.float32)
        y = Product.apply(values, self.stored, self.across, self.how)
        if self.branch is not None:
            y = y + values @ self.branch[1] @ self.branch[0].t()
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def convert(model: Any, how: How) -> None:
    """Replace the frozen linears under the adapters of both blocks, and let adapters keep x in 4 bits."""
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        for module in list(block.modules()):
            base = getattr(module, "base_layer", None)
            if isinstance(base, nn.Linear):
                module.base_layer = FourBitLinear(base, how)
                for a in module.lora_A.values() if how.x else ():
                    a.forward = lambda x, a=a: KeptInput.apply(x.to(a.weight.dtype), a.weight)


def main() -> int:
    """Compare every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=24, help="attention heads of 128 (default: FLUX.1's 24)")
    parser.add_argument("--tokens", type=int, nargs=2, default=(64, 192), metavar=("TEXT", "IMAGE"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help="rows")
    options = parser.parse_args()
    model, tokens = make_model(options.heads), tuple(options.tokens)
    print(
        f"torch {torch.__version__}, {options.heads} heads x {HEAD_DIM}, rank {RANK}, tokens {tokens}\n\n"
        "| in 4 bits | block | outliers | output dB | gradients, lowest dB | median dB | lowest cosine | lowest at |\n"
        f"|{'---|' * 8}",
        flush=True,
    )
    cases = [(kind, outliers) for kind in ("double", "single") for outliers in OUTLIERS]
    exact = prepare(model, {"enabled": False}, "peft", RANK)
    expected = {case: run_block(exact, case[0], tokens, case[1]) for case in cases}
    for name in options.settings:
        how = SETTINGS[name]
        torch.manual_seed(0)
        changed = prepare(model, {"enabled": False}, "peft", RANK)
        convert(changed, how)
        for case in cases:
            print(
                report_row(name, *case, compare(run_block(changed, *case[:1], tokens, case[1]), expected[case])),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
