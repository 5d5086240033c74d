"""Error of the AdamW update after storing its moments in 8 bits, on captures of `scripts/capture_moments.py`.

    python scripts/moment_error.py [output/moments ...]

For each way of storing exp_avg (m) and exp_avg_sq (v): the mean of (m/(sqrt(v) + 1e-8) - the same from the stored m
and v)² over all elements, times 1e4, and the share of nonzero v that come back as zero. A second table has, for each
depth of the transformer, the error of int8_ratio with uint8_log as a share of that of expanded e4m3 and of
bitsandbytes'. Prints Markdown. bitsandbytes and torchao are measured when they can be imported, with their own
quantization functions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from coat_core.config import PAPER_EXPANSION, ExpansionConfig, FP8QuantizationConfig
from coat_core.expansion import QuantizedBlocks, dequantize_blocks, expand, expansion_parameters
from coat_core.formats import E4M3
from coat_core.moments import dequantize_log, quantize_log
from coat_core.optim.state import convert_state, read_state, storages
from coat_core.quantize import join_groups, saturating_cast, scale_from_amax, split_groups

EPS = 1e-8
BLOCK = 128
RoundTrip = Callable[[Tensor], Tensor]
Method = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # m, v -> both as they come back
Moments = dict[str, Tensor]

COAT = "e4m3, e4m3, expanded"
BEST = "int8_ratio, uint8_log"
EXPONENTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # of the exponent that spans the whole block
POWERS = (0.2, 0.25, 1 / 3, 0.4, 0.5, 0.6, 0.75, 1.0)


def stored(**options: object) -> Method:
    """What FP8AdamW with these options keeps of the moments of one parameter."""
    exact, asked = (
        storages(FP8QuantizationConfig(**kind)) for kind in ({"use_fp8_m1": False, "use_fp8_m2": False}, options)
    )
    return lambda m, v: read_state(convert_state({"exp_avg": m, "exp_avg_sq": v}, exact, asked), asked)


def in_blocks(round_trip: Method) -> Method:
    """Apply a round trip of blocks [n, B] to tensors of any shape, their tails padded with zeros."""

    def whole(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pair = round_trip(*(split_groups(x.reshape(-1), BLOCK) for x in (m, v)))
        return tuple(join_groups(x, m.numel()).view_as(m) for x in pair)

    return whole


def apart(of_m: RoundTrip, of_v: RoundTrip) -> Method:
    """Store each moment by itself."""
    return lambda m, v: (of_m(m), of_v(v))


def least_error(candidates: list[Tensor], errors: list[Tensor]) -> Tensor:
    """Of several round trips of blocks [n, B] the best for each block, by errors [n, B]."""
    best = torch.stack([error.sum(-1) for error in errors]).argmin(0)
    return torch.stack(candidates)[best, torch.arange(len(best))]


def expanded_by(blocks: Tensor, factor: float) -> Tensor:
    """E4m3 with a multiple of the exponent that spans the whole block."""
    center, exponent = expansion_parameters(blocks, E4M3, ExpansionConfig())
    exponent = exponent * factor
    values = expand(blocks, center, exponent)
    scale = scale_from_amax(values.abs().amax(dim=-1, keepdim=True), E4M3)
    return dequantize_blocks(QuantizedBlocks(saturating_cast(values / scale, E4M3), scale, center, exponent))


def best_expansion(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Expanded e4m3 with k chosen per block and moment for the least error of the update; v must not become 0."""
    weight = torch.where(v > 0, 1 / v.clamp(min=1e-37), 0.0)
    of_m = [expanded_by(m, factor) for factor in EXPONENTS]
    of_v = [expanded_by(v, factor) for factor in EXPONENTS]
    lost = [((back == 0) & (v > 0)).any(-1, keepdim=True) * torch.finfo(torch.float32).max for back in of_v]
    errors = [update(m, back).sub(update(m, v)).square().nan_to_num() for back in of_v]
    kept = [error + too_much / BLOCK for error, too_much in zip(errors, lost, strict=True)]
    return least_error(of_m, [(back - m).square() * weight for back in of_m]), least_error(of_v, kept)


def companded(x: Tensor, power: float) -> Tensor:
    """Signed int8 of abs(x/largest)^power."""
    high = x.abs().amax(dim=-1, keepdim=True)
    high = torch.where(high > 0, high, 1.0)
    codes = torch.round((x.abs() / high).pow(power) * 127)
    return torch.sign(x) * high * (codes / 127).pow(1 / power)


def log_grid(v: Tensor) -> Tensor:
    """uint8_log, of blocks."""
    found = quantize_log(v)
    return dequantize_log(found.codes, found.scale, found.exponent)


def fitted_power(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Companded int8 with the power chosen per block for the least error of the update, and uint8_log."""
    weight = torch.where(v > 0, 1 / v.clamp(min=1e-37), 0.0)
    candidates = [companded(m, power) for power in POWERS]
    return least_error(candidates, [(back - m).square() * weight for back in candidates]), log_grid(v)


def companded_ratio(power: float, *, of_stored: bool = False) -> Method:
    """Companded int8 of m/sqrt(v), v exact or as stored, and uint8_log."""

    def round_trip(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        back = log_grid(v)
        ratio = torch.where(v > 0, m / (back if of_stored else v).sqrt(), 0.0)
        return companded(ratio, power) * back.sqrt(), back

    return in_blocks(round_trip)


def own_methods() -> Iterator[tuple[str, Method]]:
    """Every way of FP8AdamW, and what else was tried."""
    yield "e4m3, e4m3", stored(use_dynamic_range_expansion=False)
    yield COAT, stored()
    yield "· with the constants of the paper's kernel", stored(expansion=PAPER_EXPANSION)
    yield "· k for the least error", in_blocks(best_expansion)
    yield "· block 64", stored(block_size=64)
    yield "e5m2, e5m2, expanded", stored(m1_format="e5m2", m2_format="e5m2")
    yield "int8 of abs(m)^0.5, uint8_log", in_blocks(lambda m, v: (companded(m, 0.5), log_grid(v)))
    yield "int8 of abs(m)^p, p for the least error, uint8_log", in_blocks(fitted_power)
    yield BEST, stored(m1_format="int8_ratio", m2_format="uint8_log")
    yield (
        "· block 64 (the bytes of e4m3, expanded)",
        stored(m1_format="int8_ratio", m2_format="uint8_log", block_size=64),
    )
    yield "· block 256", stored(m1_format="int8_ratio", m2_format="uint8_log", block_size=256)
    for power in (0.75, 0.5):
        yield f"· abs(ratio)^{power}", companded_ratio(power)
    yield "· ratio to the v that is stored", companded_ratio(1.0, of_stored=True)
    yield "int8_ratio, e4m3 expanded", stored(m1_format="int8_ratio")
    yield "e4m3 expanded, uint8_log", stored(m2_format="uint8_log")
    yield "e4m3 expanded, fp32", stored(use_fp8_m2=False)
    yield "fp32, e4m3 expanded", stored(use_fp8_m1=False)
    yield "fp32, uint8_log", stored(use_fp8_m1=False, m2_format="uint8_log")


def bitsandbytes_method() -> tuple[str, Method]:
    """Dynamic 8-bit of bitsandbytes' AdamW8bit: signed map for m, unsigned for v, blocks of 256."""
    import bitsandbytes
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    def with_map(signed: bool) -> RoundTrip:
        code = create_dynamic_map(signed=signed)
        return lambda x: dequantize_blockwise(*quantize_blockwise(x.contiguous(), code=code, blocksize=256)).view_as(x)

    return f"bitsandbytes {bitsandbytes.__version__} dynamic 8-bit (block 256)", apart(with_map(True), with_map(False))


def torchao_method() -> tuple[str, Method]:
    """AdamWFp8 of torchao: e4m3 with a scale for blocks of 256."""
    import torchao
    from torchao.optim.subclass_fp8 import OptimStateFp8, quantize_fp8

    def round_trip(x: Tensor) -> Tensor:
        back = OptimStateFp8(*quantize_fp8(split_groups(x.reshape(-1), 256), 256)).dequantize()
        return join_groups(back, x.numel()).view_as(x)

    return f"torchao {torchao.__version__} AdamWFp8 (block 256)", apart(round_trip, round_trip)


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


def measure(moments: Moments, method: Method) -> tuple[float, float]:
    """Return (mean squared error of the update, share of nonzero v that come back as zero) over all parameters."""
    error, count, lost, nonzero = 0.0, 0, 0, 0
    for key, m in moments.items():
        if not key.endswith(".exp_avg"):
            continue
        v = moments[f"{key}_sq"]
        m_hat, v_hat = method(m, v)
        error += (update(m.double(), v.double()) - update(m_hat.double(), v_hat.double())).square().sum().item()
        count += m.numel()
        nonzero += int((v != 0).sum())
        lost += int(((v != 0) & (v_hat == 0)).sum())
    return error / count, lost / max(nonzero, 1)


def depth_of(key: str) -> str:
    """Where in the transformer a parameter is: "double 0", "single 5" or, of no block, "outside"."""
    found = re.match(r"(single_)?transformer_blocks\.(\d+)\.", key)
    return f"{'single' if found[1] else 'double'} {int(found[2]):2}" if found else "outside"


def print_methods(captures: dict[int, Moments], methods: dict[str, Method]) -> None:
    """The error of every method at every step."""
    print(f"MSE of m/(sqrt(v) + {EPS:g}), times 1e4; block {BLOCK} unless said\n")
    print("| m, v stored as |" + "".join(f" step {step} |" for step in captures) + " nonzero v → 0, worst step |")
    print("|---|" + "---|" * (len(captures) + 1))
    for name, method in methods.items():
        results = [measure(moments, method) for moments in captures.values()]
        cells = "".join(f" {error * 1e4:.4g} |" for error, _ in results)
        print(f"| {name} |{cells} {max(lost for _, lost in results):.2g} |", flush=True)


def print_depths(captures: dict[int, Moments], methods: dict[str, Method], others: list[str]) -> None:
    """The error of the best at every depth and step, as a share of those of others."""
    print(f"\nError of {BEST} as a share of that of {' · '.join(others)}, by depth\n")
    print("| block |" + "".join(f" step {step} |" for step in captures) + "\n|---|" + "---|" * len(captures))
    for depth in sorted({depth_of(key) for key in next(iter(captures.values()))}):
        cells = []
        for moments in captures.values():
            here = {key: tensor for key, tensor in moments.items() if depth_of(key) == depth}
            best = measure(here, methods[BEST])[0]
            cells.append(" · ".join(f"{best / measure(here, methods[name])[0]:.2g}" for name in others))
        print(f"| {depth} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the tables of each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=[Path("output/moments")])
    methods = {**dict(own_methods()), **dict(other_methods())}
    rivals = [COAT, *(name for name in methods if name.startswith("bitsandbytes"))]
    for folder in parser.parse_args().folders:
        captures = {int(path.stem.removeprefix("step_")): load_file(path) for path in sorted(folder.glob("step_*"))}
        if not captures:
            raise SystemExit(f"{folder}: no step_*.safetensors; make them with scripts/capture_moments.py")
        print(f"\n### {folder.name}\n")
        print_methods(captures, methods)
        print_depths(captures, methods, rivals)


if __name__ == "__main__":
    main()
