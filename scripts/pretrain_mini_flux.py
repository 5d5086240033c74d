"""Trains the mini-FLUX from nothing: `python scripts/pretrain_mini_flux.py [--out FOLDER]`.

About an hour on 2 CPU cores. Pictures and captions are drawn (`scripts/mini_flux/pictures.py`); nothing is downloaded.
The result is a complete FLUX.1 folder in diffusers layout; the one in `extensions/coat_flux/mini_flux/files` was
made by it.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch
from mini_flux import models
from mini_flux.folder import write_flux
from mini_flux.pictures import GARMENTS, KNOWN
from mini_flux.training import embed_captions, encode, make_pictures, train_transformer, train_vae
from transformers import AutoTokenizer

from coat_flux.mini_flux import MINI_FLUX

ROOT = Path(__file__).resolve().parents[1]
# (width, height) -> how many pictures: mostly squares, and some of each shape that buckets of 64 and 96 make
SIZES = {(64, 64): 9000, (48, 80): 1500, (80, 48): 1000, (64, 48): 1000, (48, 64): 1000, (96, 96): 1500}


def main() -> None:
    """Trains the VAE on all garments, also the one the transformer never sees, then the transformer on its latents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "mini_flux", help="folder of the model")
    parser.add_argument("--vae-steps", type=int, default=3500, metavar="N")
    parser.add_argument("--steps", type=int, default=3000, metavar="N", help="of the transformer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options, started = parser.parse_args(), time.monotonic()
    device = torch.device(options.device)
    clip, t5 = models.build_text_encoders()
    pixels, _ = make_pictures((64, 64), sum(SIZES.values()) // 2, 1, tuple(GARMENTS))
    vae = train_vae(pixels, options.vae_steps, device)
    print(f"VAE after {time.monotonic() - started:.0f} s", flush=True)
    tokenizers = [AutoTokenizer.from_pretrained(MINI_FLUX / name) for name in ("tokenizer", "tokenizer_2")]
    pictures = [make_pictures(size, count, 2, KNOWN) for size, count in SIZES.items()]
    rows, captions = embed_captions([items for _, items in pictures], (clip, t5), tokenizers, seed=2)
    print(f"{len(captions.embeds)} captions after {time.monotonic() - started:.0f} s", flush=True)
    sets = [(encode(vae, pixels), row) for (pixels, _), row in zip(pictures, rows, strict=True)]
    transformer = train_transformer(sets, captions, options.steps, device)
    shutil.rmtree(options.out, ignore_errors=True)
    write_flux(
        options.out,
        transformer=(transformer, models.TRANSFORMER_CONFIG),
        vae=(vae, {key: vae.config[key] for key in models.VAE_CONFIG}),
        clip=(clip, models.clip_config()),
        t5=(t5, models.t5_config()),
        t5_tokens=models.T5_TOKENS,
    )
    print(f"the mini-FLUX is in {options.out}, made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
