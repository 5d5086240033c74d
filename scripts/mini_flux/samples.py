"""Drawing with the mini-FLUX through diffusers' own pipeline, and a sheet of what it drew."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import FluxPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .models import T5_TOKENS
from .pictures import BACKGROUNDS, COLOURS, HELD_OUT, KNOWN, PATTERNS, Item, caption, is_held_out

STEPS, GUIDANCE = 20, 4.0
_AT_ONCE = 25
_TEXT, _HEADLINE = 15, 20  # font sizes of the grid
_GAP = 8  # pixels between its pictures


def unseen_items(count: int, seed: int = 0) -> list[Item]:
    """Combinations of known garments that were never trained on, all before any comes again."""
    known = (Item(*names) for names in product(KNOWN, COLOURS, PATTERNS, BACKGROUNDS))
    items = [item for item in known if is_held_out(item)]
    random.Random(seed).shuffle(items)
    return [items[i % len(items)] for i in range(count)]


def prompts_of(items: Sequence[Item], seed: int = 0, trigger: str | None = None) -> list[str]:
    """A prompt for each item; `trigger` stands in the place of the held-out garment's name."""
    rng = random.Random(seed)
    named = [i._replace(garment=trigger) if trigger and i.garment == HELD_OUT else i for i in items]
    return [caption(item, rng) for item in named]


def load_pipeline(model: Path) -> FluxPipeline:
    """The whole pipeline in fp32, without progress bars."""
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    pipeline = FluxPipeline.from_pretrained(model).to(torch.float32)  # dtype has another name in every second version
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_prompts(
    pipeline: FluxPipeline, prompts: Sequence[str], size: tuple[int, int] = (64, 64), seed: int = 0
) -> Tensor:
    """Draws a picture (width, height) per prompt, from noise of seed + its number: uint8 [N, 3, H, W]."""
    parts = []
    for start in range(0, len(prompts), _AT_ONCE):
        batch = list(prompts[start : start + _AT_ONCE])
        drawn = pipeline(
            batch,
            width=size[0],
            height=size[1],
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            max_sequence_length=T5_TOKENS,
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(batch))],
            output_type="pt",
        )
        parts.append(drawn.images)
    return (torch.cat(parts).clamp(0, 1) * 255).round().byte()


def sheet(pixels: Tensor, columns: int) -> Image.Image:
    """Pictures uint8 [N, 3, H, W] row by row."""
    height, width = pixels.shape[2:]
    rows = -(-len(pixels) // columns)
    page = Image.new("RGB", (columns * width, rows * height), "white")
    for i, picture in enumerate(pixels):
        page.paste(Image.fromarray(picture.permute(1, 2, 0).numpy()), (i % columns * width, i // columns * height))
    return page


def grid(rows: Mapping[str, Tensor], prompts: Sequence[str], headline: str, enlarged: int = 4) -> Image.Image:
    """Pictures uint8 [N, 3, H, W] by name, under a headline: N prompts above the columns, names left of the rows."""
    text, large = ImageFont.load_default(_TEXT), ImageFont.load_default(_HEADLINE)
    height, width = (enlarged * side for side in next(iter(rows.values())).shape[2:])
    wrapped = [textwrap.fill(prompt, int(width / text.getlength("n"))) for prompt in prompts]
    left = 2 * _GAP + round(max(text.getlength(word) for name in rows for word in name.split()))
    lines = max(prompt.count("\n") + 1 for prompt in wrapped)
    top = 3 * _GAP + _HEADLINE + lines * (_TEXT + 4)
    size = (left + len(prompts) * (width + _GAP), top + len(rows) * (height + _GAP))
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    draw.text((left, _GAP), headline, "black", large)
    for column, prompt in enumerate(wrapped):
        x = left + column * (width + _GAP)
        draw.multiline_text((x, top - _GAP), prompt, "black", text, anchor="ld", spacing=3)
    for row, (name, pictures) in enumerate(rows.items()):
        y = top + row * (height + _GAP)
        draw.multiline_text((_GAP, y + height // 2), name.replace(" ", "\n"), "black", text, anchor="lm", spacing=3)
        for column, picture in enumerate(pictures):
            image = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize((width, height), Image.Resampling.NEAREST)
            page.paste(image, (left + column * (width + _GAP), y))
    return page
