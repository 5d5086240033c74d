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
from diffusers import AutoencoderKL
from mini_flux import models
from mini_flux.folder import FluxParts, write_parts
from mini_flux.pictures import GARMENTS
from mini_flux.train_transformer import TRANSFORMER_STEPS, Shape, embed_captions, train_transformer
from mini_flux.train_vae import VAE_STEPS, encode, train_vae
from mini_flux.training_set import SIZES, make_pictures
from torch import nn
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "mini_flux", help="folder of the model")
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS, metavar="N", help="0: the VAE in --out as it is")
    parser.add_argument("--steps", type=int, default=TRANSFORMER_STEPS, metavar="N", help="of the transformer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def make_vae(options: argparse.Namespace) -> AutoencoderKL:
    """Trains the VAE on all garments, also the one the transformer never sees, or reads the one that is there."""
    if options.vae_steps == 0:
        return AutoencoderKL.from_pretrained(options.out / "vae").to(options.device).eval()
    pictures = make_pictures((64, 64), sum(SIZES.values()) // 2, seed=1, garments=tuple(GARMENTS))
    return train_vae(pictures.pixels, options.vae_steps, torch.device(options.device))


def write(folder: Path, transformer: nn.Module, vae: AutoencoderKL, clip: nn.Module, t5: nn.Module) -> None:
    """Writes the model, in place of what is there."""
    vae_config = {key: vae.config[key] for key in models.VAE_CONFIG}
    texts = (clip, models.clip_config(), t5, models.t5_config())
    shutil.rmtree(folder, ignore_errors=True)
    write_parts(folder, FluxParts(transformer, models.TRANSFORMER_CONFIG, vae, vae_config, *texts, models.T5_TOKENS))


def main() -> None:
    """Trains the VAE, then the transformer on its latents."""
    options, started = parse_arguments(), time.monotonic()
    clip, t5 = models.build_text_encoders()
    vae = make_vae(options)
    write(options.out, models.build_transformer(), vae, clip, t5)  # so that the VAE is not lost
    print(f"VAE in {options.out} after {time.monotonic() - started:.0f} s", flush=True)
    tokenizers = [AutoTokenizer.from_pretrained(options.out / name) for name in ("tokenizer", "tokenizer_2")]
    sets = [make_pictures(size, count, seed=2) for size, count in SIZES.items()]
    rows, texts = embed_captions([one.items for one in sets], (clip, t5), tokenizers, seed=2)
    print(f"{len(texts.embeds)} captions after {time.monotonic() - started:.0f} s", flush=True)
    shapes = [Shape(encode(vae, one.pixels), row) for one, row in zip(sets, rows, strict=True)]

    def keep(transformer: nn.Module) -> None:
        write(options.out, transformer, vae, clip, t5)

    keep(train_transformer(shapes, texts, options.steps, torch.device(options.device), keep))
    print(f"the mini-FLUX is in {options.out}, made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
