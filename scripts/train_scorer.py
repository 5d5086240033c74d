"""Trains the classifier that scores the mini-FLUX: `python scripts/train_scorer.py --vae MODEL/vae`.

Some minutes on one CPU core. Pictures are drawn; a share of them goes through the mini-FLUX's VAE with noise on the
latents, so that a blurred or slightly wrong sample is judged by what it shows. Ends with the accuracy on pictures that
were not trained on, held-out combinations included; exit code 1 below 99 % of any attribute.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from mini_flux.pictures import GARMENTS
from mini_flux.scorer import ATTRIBUTES, WEIGHTS, Scorer, accuracies, judge, load_scorer, right, save_scorer
from mini_flux.train_vae import encode
from mini_flux.training_set import PictureSet, make_pictures, to_unit
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
SIZES = {(64, 64): 4000, (48, 80): 400, (80, 48): 300}  # (width, height) -> pictures
DECODED_SHARE = 0.2
LATENT_NOISE = 0.25  # largest standard deviation of what is added to latents of variance 1
TRAIN_SEED, TEST_SEED = 11, 12
BATCH, LR = 64, 4e-3
LEAST = 0.99


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, default=ROOT / "models" / "coat_mini_flux" / "vae", metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--out", type=Path, default=WEIGHTS, metavar="FILE")
    return parser.parse_args()


@torch.no_grad()
def through_vae(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Pictures as the mini-FLUX would draw them: uint8 [N, 3, H, W] of the same shape."""
    latents = encode(vae, pixels)
    latents = latents + LATENT_NOISE * torch.rand(len(latents), 1, 1, 1) * torch.randn_like(latents)
    latents = latents / vae.config.scaling_factor + vae.config.shift_factor
    decoded = torch.cat([vae.decode(part).sample for part in latents.split(64)])
    return ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte()


def training_set(vae: AutoencoderKL) -> list[tuple[Tensor, Tensor]]:
    """Pixels and labels of each size; some pictures come a second time, through the VAE."""
    sets = []
    for size, count in SIZES.items():
        drawn = make_pictures(size, count, TRAIN_SEED, tuple(GARMENTS), held_out=True)
        again = through_vae(vae, drawn.pixels[: round(count * DECODED_SHARE)])
        labels = drawn.labels()
        sets.append((torch.cat([drawn.pixels, again]), torch.cat([labels, labels[: len(again)]])))
    return sets


def augmented(pixels: Tensor) -> Tensor:
    """Light changes that leave what a picture shows: uint8 [B, 3, H, W] -> fp32 in about -1 to 1."""
    x = to_unit(pixels)
    x = x.roll((int(torch.randint(-3, 4, ())), int(torch.randint(-3, 4, ()))), (2, 3))
    if torch.rand(()) < 0.5:
        x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1) * 0.6 + x * 0.4
    x = x * (1 + 0.08 * torch.randn(len(x), 1, 1, 1)) + 0.04 * torch.randn(len(x), 3, 1, 1)
    return x + 0.06 * torch.rand(len(x), 1, 1, 1) * torch.randn_like(x)


def train(sets: list[tuple[Tensor, Tensor]], steps: int) -> Scorer:
    """Cross entropy of all four heads; sizes are drawn by how many pictures they have."""
    torch.manual_seed(0)
    scorer, started = Scorer(), time.monotonic()
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=LR, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, pct_start=0.1)
    share = torch.tensor([float(len(pixels)) for pixels, _ in sets])
    for step in range(steps):
        pixels, labels = sets[int(torch.multinomial(share, 1))]
        chosen = torch.randint(0, len(pixels), (BATCH,))
        logits = scorer(augmented(pixels[chosen]))
        loss = sum(F.cross_entropy(x, labels[chosen, i], label_smoothing=0.02) for i, x in enumerate(logits))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{step}/{steps}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s", flush=True)
    return scorer.eval()


def report(name: str, scorer: Scorer, pictures: PictureSet) -> bool:
    """Prints one line of accuracies; whether every attribute is right often enough."""
    shares = accuracies(right(judge(scorer, pictures.pixels), pictures.items))
    print(f"{name}: " + ", ".join(f"{key} {share:.2%}" for key, share in shares.items()), flush=True)
    return min(shares[key] for key in ATTRIBUTES) >= LEAST


def main() -> int:
    """Trains, writes, tests what was written."""
    options = parse_arguments()
    vae = AutoencoderKL.from_pretrained(options.vae).eval()
    save_scorer(train(training_set(vae), options.steps), options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e3:.0f} kB")
    scorer, passed = load_scorer(options.out), []
    for size in ((64, 64), (48, 80)):
        pictures = make_pictures(size, 1000, TEST_SEED, tuple(GARMENTS), held_out=True)
        passed.append(report(f"{size[0]}x{size[1]}, drawn", scorer, pictures))
        decoded = PictureSet(through_vae(vae, pictures.pixels[:300]), pictures.items[:300])
        report(f"{size[0]}x{size[1]}, through the VAE", scorer, decoded)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
