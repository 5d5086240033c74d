"""Error of the AdamW update when the moments are stored in 8 bits after every step, over a real LoRA training.

    python scripts/moment_drift.py [--steps 400] [--lr 1e-3] [--seed 0]

`scripts/moment_error.py` stores exact moments once. Here each way of storing keeps its own m and v, rounded after each
step and updated with the gradients of one fp32 training, as an optimizer does: small biases of a round trip add up.
Prints, at steps 1, 2, 10, 30, 100, 200, 400: the mean squared error of m/(sqrt(v) + 1e-8) of the stored moments against
the exact ones, times 1e4, the geometric mean of stored v / exact v, and the smallest and largest such ratio.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from capture_moments import ROOT, build_lora_flux, encode_dataset, losses
from moment_error import BEST, COAT, Method, bitsandbytes_method, own_methods, stored, update
from torch import Tensor

from coat_core.config import ExpansionConfig
from coat_flux.mini_flux.folder import make_tiny_flux

REPORTED = (1, 2, 10, 30, 100, 200, 400)
BETA1, BETA2 = 0.9, 0.999


# of those in scripts/moment_error.py
COMPARED = (
    "e4m3, e4m3",
    "· with the constants of the paper's kernel",
    COAT,
    "int8 of abs(m)^0.5, uint8_log",
    "int8 of abs(m)^p, p for the least error, uint8_log",
    BEST,
    "· abs(ratio)^0.75",
    "· ratio to the v that is stored",
    "int8_ratio, e4m3 expanded",
    "fp32, uint8_log",
)


def methods() -> dict[str, Method]:
    """The ways of storing that are compared."""
    known = dict(own_methods())
    found = {name: known[name] for name in COMPARED}
    for fraction, text in ((1.0, "1"), (2 / 7, "2/7 (smallest value on code 4)")):
        found[f"e4m3, e4m3, expanded: {text}, k exact"] = stored(expansion=ExpansionConfig(fraction, 0.0))
    found["int8_ratio, fp32"] = stored(m1_format="int8_ratio", use_fp8_m2=False)
    try:
        return found | dict([bitsandbytes_method()])
    except ImportError:
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


def row(name: str, track: Track, exact: Track) -> str:
    """One line of the table."""
    error = (track.direction() - exact.direction()).square().mean().item() * 1e4
    known = exact.v > torch.finfo(torch.float32).tiny
    ratio = track.v[known].double() / exact.v[known].double()
    return f"| {name} | {error:.4g} | {ratio.log().mean().exp():.3f} | {ratio.min():.3g} | {ratio.max():.3g} |"


def main() -> None:
    """Train, and print a table at each of the reported steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "datasets_example" / "clothing")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where the embedded model is made")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = build_lora_flux(blocks=2, heads=2, head_dim=64, rank=16, seed=args.seed)
    data = encode_dataset(args.data, make_tiny_flux(args.models / "tiny-flux"), size=96)
    params = [param for param in model.parameters() if param.requires_grad]
    size = sum(param.numel() for param in params)
    optimizer = torch.optim.AdamW(params, lr=args.lr, betas=(BETA1, BETA2), weight_decay=1e-4)
    exact, tracks = Track(size), {name: Track(size, method) for name, method in methods().items()}
    print(f"{size:,} parameters")
    for step, loss in zip(range(1, args.steps + 1), losses(model, data, 2, args.seed), strict=False):
        optimizer.zero_grad()
        loss.backward()
        grad = torch.cat([param.grad.flatten() for param in params])
        optimizer.step()
        for track in (exact, *tracks.values()):
            track.step(grad)
        if step in REPORTED:
            print(f"\nStep {step}, loss {loss.item():.4f}\n")
            print("| m, v stored as | MSE x 1e4 | mean stored v / v | smallest | largest |\n|---|---|---|---|---|")
            print("\n".join(row(name, track, exact) for name, track in tracks.items()), flush=True)


if __name__ == "__main__":
    main()
