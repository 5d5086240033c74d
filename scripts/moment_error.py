"""Error of the AdamW update after storing its moments in 8 bits, on captures of `scripts/capture_moments.py`.

    python scripts/moment_error.py [output/moments]

For each way of storing exp_avg (m) and exp_avg_sq (v): the mean of (m/(sqrt(v) + 1e-8) - the same from the stored m
and v)² over all elements, times 1e4, and the share of nonzero v that come back as zero. Prints a Markdown table.
bitsandbytes and torchao are measured when they can be imported, with their own quantization functions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from coat_core.config import PAPER_EXPANSION, ExpansionConfig
from coat_core.expansion import QuantizedBlocks, dequantize_blocks, expand, expansion_parameters, quantize_blocks
from coat_core.formats import Format, get_format
from coat_core.quantize import join_groups, saturating_cast, scale_from_amax, split_groups

EPS = 1e-8
PAPER = PAPER_EXPANSION
# Both ends of a block land on codes, the largest value on max and the smallest on code 2: a round trip of a round trip
# changes nothing, so no bias adds up over the steps (scripts/moment_drift.py).
FIXED_POINT = ExpansionConfig()
RoundTrip = Callable[[Tensor], Tensor]
Method = tuple[RoundTrip, RoundTrip]  # of m and of v


def blockwise(block_size: int, round_trip: RoundTrip) -> RoundTrip:
    """Apply a round trip of blocks [n, B] to a tensor of any shape, the tail padded with zeros."""

    def whole(x: Tensor) -> Tensor:
        return join_groups(round_trip(split_groups(x.reshape(-1), block_size)), x.numel()).view_as(x)

    return whole


def coat(name: str, expansion: ExpansionConfig | None, block_size: int = 128) -> RoundTrip:
    """The round trip of FP8AdamW."""
    fmt = get_format(name)
    return blockwise(block_size, lambda blocks: dequantize_blocks(quantize_blocks(blocks, fmt, expansion)))


def coat_at_least_one(name: str, expansion: ExpansionConfig, block_size: int = 128) -> RoundTrip:
    """The same with the exponent held at 1 or above: expansion only, never compression."""
    fmt: Format = get_format(name)

    def round_trip(blocks: Tensor) -> Tensor:
        center, exponent = expansion_parameters(blocks, fmt, expansion)
        exponent = exponent.clamp(min=1.0)
        expanded = expand(blocks, center, exponent)
        scale = scale_from_amax(expanded.abs().amax(dim=-1, keepdim=True), fmt)
        codes = saturating_cast(expanded / scale, fmt)
        return dequantize_blocks(QuantizedBlocks(codes, scale, center, exponent))

    return blockwise(block_size, round_trip)


def own_methods() -> Iterator[tuple[str, Method]]:
    """Every way of `coat_core` under test."""

    def both(m: str, v: str, expansion: ExpansionConfig | None, block_size: int = 128) -> Method:
        return coat(m, expansion, block_size), coat(v, expansion, block_size)

    yield "e4m3, e4m3", both("e4m3", "e4m3", None)
    yield "e4m3, e4m3 expanded: 448²·4/7, k exact", both("e4m3", "e4m3", FIXED_POINT)
    yield "e4m3, e4m3 expanded as the paper's kernel: 448²/2, k in 1/16", both("e4m3", "e4m3", PAPER)
    clamped = coat_at_least_one("e4m3", PAPER)
    yield "· the same, k at least 1", (clamped, clamped)
    for fraction, text in ((1.0, "448²"), (0.5, "448²/2"), (2 / 7, "448²·2/7")):
        yield f"· {text}, k exact", both("e4m3", "e4m3", ExpansionConfig(fraction, 0.0))
    for fraction, text in ((1.0, "448²"), (4 / 7, "448²·4/7")):
        yield f"· {text}, k in 1/16", both("e4m3", "e4m3", ExpansionConfig(fraction, 1 / 16))
    for size in (16, 64, 256, 1024):
        yield f"· 448²·4/7, k exact, block {size}", both("e4m3", "e4m3", FIXED_POINT, size)
    for m, v in (("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")):
        yield f"{m}, {v}", both(m, v, None)
        yield f"{m}, {v} expanded: max²·4/7, k exact", both(m, v, FIXED_POINT)
    exact: RoundTrip = torch.clone
    yield "e4m3 expanded (4/7, exact), fp32", (coat("e4m3", FIXED_POINT), exact)
    yield "fp32, e4m3 expanded (4/7, exact)", (exact, coat("e4m3", FIXED_POINT))


def bitsandbytes_method() -> tuple[str, Method]:
    """Dynamic 8-bit of bitsandbytes' AdamW8bit: signed map for m, unsigned for v, blocks of 256."""
    import bitsandbytes
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    def with_map(signed: bool) -> RoundTrip:
        code = create_dynamic_map(signed=signed)
        return lambda x: dequantize_blockwise(*quantize_blockwise(x.contiguous(), code=code, blocksize=256)).view_as(x)

    return f"bitsandbytes {bitsandbytes.__version__} dynamic 8-bit (block 256)", (with_map(True), with_map(False))


def torchao_method() -> tuple[str, Method]:
    """AdamWFp8 of torchao: e4m3 with a scale for blocks of 256."""
    import torchao
    from torchao.optim.subclass_fp8 import OptimStateFp8, quantize_fp8

    round_trip = blockwise(256, lambda blocks: OptimStateFp8(*quantize_fp8(blocks, 256)).dequantize())
    return f"torchao {torchao.__version__} AdamWFp8 (block 256)", (round_trip, round_trip)


def other_methods() -> Iterator[tuple[str, Method]]:
    """What others' optimizers do, as far as installed."""
    for make in (bitsandbytes_method, torchao_method):
        try:
            yield make()
        except ImportError as error:
            print(f"{make.__name__}: not measured, {error}\n")


def update(m: Tensor, v: Tensor) -> Tensor:
    """The direction of AdamW's step without bias correction."""
    return m / (v.sqrt() + EPS)


def measure(moments: dict[str, Tensor], method: Method) -> tuple[float, float]:
    """Return (mean squared error of the update, share of nonzero v that come back as zero) over all parameters."""
    error, count, lost, nonzero = 0.0, 0, 0, 0
    for key, m in moments.items():
        if not key.endswith(".exp_avg"):
            continue
        v = moments[f"{key}_sq"]
        m_hat, v_hat = method[0](m), method[1](v)
        error += (update(m.double(), v.double()) - update(m_hat.double(), v_hat.double())).square().sum().item()
        count += m.numel()
        nonzero += int((v != 0).sum())
        lost += int(((v != 0) & (v_hat == 0)).sum())
    return error / count, lost / max(nonzero, 1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("output/moments"))
    folder = parser.parse_args().folder
    captures = {int(path.stem.removeprefix("step_")): load_file(path) for path in sorted(folder.glob("step_*"))}
    if not captures:
        raise SystemExit(f"{folder}: no step_*.safetensors; make them with scripts/capture_moments.py")
    print("MSE of m/(sqrt(v) + 1e-8), times 1e4; block 128 unless said\n")
    print("| m, v stored as |" + "".join(f" step {step} |" for step in captures) + " nonzero v → 0, worst step |")
    print("|---|" + "---|" * (len(captures) + 1))
    for name, method in (*own_methods(), *other_methods()):
        results = [measure(moments, method) for moments in captures.values()]
        cells = "".join(f" {error * 1e4:.4g} |" for error, _ in results)
        print(f"| {name} |{cells} {max(lost for _, lost in results):.2g} |")


if __name__ == "__main__":
    main()
