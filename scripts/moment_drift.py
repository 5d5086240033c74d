"""Error of the AdamW update when the moments are stored in 8 bits after every step, over a real LoRA training.

    python scripts/moment_drift.py [--steps 400] [--also candidates earlier] [--lr 1e-3] [--seed 0]

`scripts/moment_error.py` stores exact moments once. Here each way of storing keeps its own m and v, rounded after each
step and updated with the gradients of one fp32 training, as an optimizer does: small biases of a round trip add up.
Prints, at steps 1, 2, 10, 30, 100, 200, 400, 1000, 2000: the mean squared error of m/(sqrt(v) + 1e-8) of the stored
moments against the exact ones, times 1e4, and that as a share of the first row's; of stored v / exact v the mean, the
geometric mean (below it where v is noisy), the smallest and the largest. Then one table with bytes per parameter.
`--also candidates` adds what else was tried with v rounded at random, `earlier` what was tried with nearest rounding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from capture_moments import ROOT, build_lora_flux, encode_dataset, losses
from moment_error import BEST, COAT, Method, bitsandbytes_method, own_methods, stored, update
from torch import Tensor

from coat_core.config import ExpansionConfig, FP8QuantizationConfig
from coat_core.moments import update_ratio
from coat_core.ops.adamw import read_moments, write_moments
from coat_core.ops.packing import Layout
from coat_core.optim.state import empty_moment, state_bytes, storages
from coat_core.quantize import join_groups, split_groups
from coat_core.rounding import between, streams, uniform
from coat_flux.mini_flux.folder import make_tiny_flux

REPORTED = (1, 2, 10, 30, 100, 200, 400, 1000, 2000)
BETA1, BETA2 = 0.9, 0.999
GOLDEN = 0.6180339887498949
INTEGERS = {"m1_format": "int8_ratio", "m2_format": "uint8_log"}


# of those in scripts/moment_error.py
EARLIER = (
    "e4m3, e4m3",
    "· with the constants of the paper's kernel",
    "int8 of abs(m)^0.5, uint8_log",
    "int8 of abs(m)^p, p for the least error, uint8_log",
    "· abs(ratio)^0.75",
    "· ratio to the v that is stored",
    "int8_ratio, e4m3 expanded",
    "fp32, uint8_log",
)


def drawn(**options: object) -> Method:
    """What FP8AdamW with these options keeps, exp_avg_sq rounded at random; each call is a step."""
    config, steps = FP8QuantizationConfig(**options), count(1)
    stream = streams(0, 1)

    def method(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        layout = Layout([m.numel()], config.block_size)
        rows, step = layout.shape[0], torch.full_like(stream, next(steps))
        packed = [empty_moment(rows, storage, m.device) for storage in storages(config).values()]
        first = torch.arange(rows, dtype=torch.int32) * config.block_size
        chances = uniform(torch.stack((stream, step, 0 * step), dim=-1).expand(rows, -1), first, config.block_size)
        values = (layout.gather([x.reshape(-1)], torch.float32) for x in (m, v))
        write_moments(*packed, slice(None), *values, config.expansion, chances)
        return tuple(x.view(-1)[: m.numel()].view_as(m) for x in read_moments(*packed, slice(None)))

    return method


class Candidate:
    """Ratios to sqrt(v), and v evenly spaced in the logarithm and rounded at random, in any number of bits.

    Args:
        m_bits, v_bits: of a code.
        block: elements that share the numbers of a grid.
        m_at_random: whether the ratio is rounded at random too.
        undecayed: v's grid is that of v / 0.999^t, so that a block's common decay moves nothing on it.
        golden: an element's draws are a golden ratio apart instead of independent.
    """

    def __init__(self, m_bits: int = 8, v_bits: int = 8, block: int = 128, **how: bool) -> None:
        self._top, self._levels, self._block, self._how = 2 ** (m_bits - 1) - 1, 2**v_bits - 3, block, how
        self._generator, self._step = torch.Generator().manual_seed(1), 0
        self.bytes = (m_bits + v_bits) / 8 + 12 / block

    def __call__(self, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store and read both moments of a step."""
        self._step += 1
        ratios, back = split_groups(update_ratio(m, v), self._block), self._second(split_groups(v, self._block))
        scale = ratios.abs().amax(dim=-1, keepdim=True) / self._top
        codes = ratios / torch.where(scale > 0, scale, 1.0)
        codes = torch.floor(codes + self._chances(codes)) if self._how.get("m_at_random") else codes.round()
        return join_groups(codes * scale * back.sqrt(), len(m)), join_groups(back, len(v))

    def _second(self, v: Tensor) -> Tensor:
        decay = BETA2**self._step if self._how.get("undecayed") else 1.0
        v, some = v / decay, v > 0
        high = v.amax(dim=-1, keepdim=True)
        high = torch.where(high > 0, high, 1.0)
        low = torch.where(some, v, high).amin(dim=-1, keepdim=True)
        exponent = (high.log2() - low.log2()) / self._levels
        below = (high.log2() - torch.where(some, v, high).log2()) / torch.where(exponent > 0, exponent, 1.0)
        upper, lower = (high * torch.exp2(-exponent * (torch.floor(below) + more)) for more in (0, 1))
        back = torch.where(between(v, lower, upper, self._chances(v)), upper, lower)
        return torch.where(some, back * decay, 0.0)

    def _chances(self, like: Tensor) -> Tensor:
        if not self._how.get("golden"):
            return torch.rand(like.shape, generator=self._generator)
        self._generator.manual_seed(1)
        return ((torch.rand(like.shape, generator=self._generator).double() + self._step * GOLDEN) % 1).float()


class Row(NamedTuple):
    """A way of storing, and its bytes per parameter where they are known."""

    method: Method
    bytes: float | None


def of_optimizer(make: Callable[..., Method], size: int, **options: object) -> Row:
    """A way of FP8AdamW."""
    return Row(make(**options), state_bytes(FP8QuantizationConfig(**options), [size]) / size)


def methods(size: int, also: list[str]) -> dict[str, Row]:
    """The ways of storing that are compared; the first is what the others are shares of."""
    found = {
        COAT: of_optimizer(stored, size),
        f"{COAT}, v at random": of_optimizer(drawn, size),
        BEST: of_optimizer(stored, size, **INTEGERS),
        f"{BEST}, v at random": of_optimizer(drawn, size, **INTEGERS),
        f"{BEST}, v at random, block 64": of_optimizer(drawn, size, **INTEGERS, block_size=64),
        "int8_ratio, fp32": of_optimizer(stored, size, m1_format="int8_ratio", use_fp8_m2=False),
    }
    try:
        found |= {name: Row(method, 2 + 8 / 256) for name, method in [bitsandbytes_method()]}
    except ImportError as error:
        print(f"bitsandbytes: not measured, {error}")
    if "candidates" in also:
        made = {
            "m at random too": Candidate(m_at_random=True),
            "9 bits of v, block 256": Candidate(v_bits=9, block=256),
            "9 bits of v, 7 of m": Candidate(m_bits=7, v_bits=9),
            "10 bits of v, 6 of m": Candidate(m_bits=6, v_bits=10),
            "grid without the block's decay": Candidate(undecayed=True),
            "draws a golden ratio apart": Candidate(golden=True),
        }
        found |= {name: Row(candidate, candidate.bytes) for name, candidate in made.items()}
    if "earlier" in also:
        known = dict(own_methods())
        found |= {name: Row(known[name], None) for name in EARLIER}
        for fraction, text in ((1.0, "1"), (2 / 7, "2/7 (smallest value on code 4)")):
            found[f"e4m3, e4m3, expanded: {text}, k exact"] = Row(
                stored(expansion=ExpansionConfig(fraction, 0.0)), None
            )
    return found


class Track:
    """m and v of one way of storing, or exact ones."""

    def __init__(self, size: int, method: Method | None = None) -> None:
        self.m, self.v, self.method = torch.zeros(size), torch.zeros(size), method

    def step(self, grad: Tensor) -> None:
        """Update both moments and store them."""
        self.m = self.m.lerp(grad, 1 - BETA1)
        self.v = (self.v * BETA2).addcmul(grad, grad, value=1 - BETA2)
        if self.method is not None:
            self.m, self.v = self.method(self.m, self.v)

    def direction(self) -> Tensor:
        """The update without bias correction, fp64."""
        return update(self.m.double(), self.v.double())

    def measure(self, exact: Track) -> tuple[float, ...]:
        """Return the update's error, and of stored v / v the mean, the geometric mean, the smallest and largest."""
        error = (self.direction() - exact.direction()).square().mean().item() * 1e4
        known = exact.v > torch.finfo(torch.float32).tiny
        ratio = self.v[known].double() / exact.v[known].double()
        return tuple(map(float, (error, ratio.mean(), ratio.log().mean().exp(), ratio.min(), ratio.max())))


def print_step(found: dict[str, tuple[float, ...]]) -> None:
    """All ways at one step."""
    print("| m, v stored as | MSE x 1e4 | share | mean stored v / v | geometric | smallest | largest |")
    print("|---|---|---|---|---|---|---|")
    first = next(iter(found.values()))[0]
    for name, (error, mean, geometric, low, high) in found.items():
        print(f"| {name} | {error:.4g} | {error / first:.2g} | {mean:.4f} | {geometric:.4f} | {low:.3g} | {high:.3g} |")


def print_summary(rows: dict[str, Row], found: dict[int, dict[str, tuple[float, ...]]]) -> None:
    """Bytes, error and mean of v, by setting, at the steps from 400 on."""
    steps = [step for step in found if step >= 400]
    print("\n| m, v stored as | B a parameter |" + "".join(f" MSE x 1e4, {step} | v / v |" for step in steps))
    print("|---|---|" + "---|---|" * len(steps))
    for name, row in rows.items():
        cells = "".join(f" {found[step][name][0]:.4g} | {found[step][name][1]:.4f} |" for step in steps)
        print(f"| {name} | {'' if row.bytes is None else f'{row.bytes:.3f}'} |{cells}")


def main() -> None:
    """Train, and print a table at each of the reported steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "datasets_example" / "clothing")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where the embedded model is made")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--also", choices=("candidates", "earlier"), nargs="+", default=[], help="more rows")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = build_lora_flux(blocks=2, heads=2, head_dim=64, rank=16, seed=args.seed)
    data = encode_dataset(args.data, make_tiny_flux(args.models / "tiny-flux"), size=96)
    params = [param for param in model.parameters() if param.requires_grad]
    size = sum(param.numel() for param in params)
    optimizer = torch.optim.AdamW(params, lr=args.lr, betas=(BETA1, BETA2), weight_decay=1e-4)
    rows = methods(size, args.also)
    exact, tracks = Track(size), {name: Track(size, row.method) for name, row in rows.items()}
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    print(f"{size:,} parameters")
    for step, loss in zip(range(1, args.steps + 1), losses(model, data, 2, args.seed), strict=False):
        optimizer.zero_grad()
        loss.backward()
        grad = torch.cat([param.grad.flatten() for param in params])
        optimizer.step()
        for track in (exact, *tracks.values()):
            track.step(grad)
        if step in REPORTED:
            found[step] = {name: track.measure(exact) for name, track in tracks.items()}
            print(f"\nStep {step}, loss {loss.item():.4f}\n")
            print_step(found[step])
            sys.stdout.flush()
    print_summary(rows, found)


if __name__ == "__main__":
    main()
