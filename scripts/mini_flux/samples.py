"""Drawing with the mini-FLUX through diffusers' own pipeline, and a sheet of what it drew."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import FluxPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .models import T5_TOKENS
from .pictures import HELD_OUT, Item, caption, is_held_out, known_items

__all__ = ["draw_prompts", "grid", "load_pipeline", "prompts_of", "sheet", "unseen_items"]

STEPS, GUIDANCE = 20, 4.0
_AT_ONCE = 25
_CAPTION = 26  # pixels below a picture of the sheet
_TEXT, _HEADLINE = 15, 20  # font sizes of the grid
_GAP = 8  # pixels between its pictures


def unseen_items(count: int, seed: int = 0) -> list[Item]:
    """Combinations of known garments that were never trained on, all before any comes again."""
    items = [item for item in known_items() if is_held_out(item)]
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
    """Draws one picture per prompt.

    Args:
        pipeline: from `load_pipeline`, perhaps with a LoRA loaded.
        prompts: N of them.
        size: width and height in pixels.
        seed: picture i starts from noise of seed + i.

    Returns:
        uint8 [N, 3, H, W].
    """
    parts = []
    for start in range(0, len(prompts), _AT_ONCE):
        some = list(prompts[start : start + _AT_ONCE])
        draws = [torch.Generator().manual_seed(seed + start + i) for i in range(len(some))]
        parts.append(
            pipeline(
                some,
                width=size[0],
                height=size[1],
                num_inference_steps=STEPS,
                guidance_scale=GUIDANCE,
                max_sequence_length=T5_TOKENS,
                generator=draws,
                output_type="pt",
            ).images
        )
    return (torch.cat(parts).clamp(0, 1) * 255).round().byte()


def sheet(pixels: Tensor, captions: Sequence[str], columns: int, enlarged: int = 2) -> Image.Image:
    """Pictures row by row, each with its caption below where there are captions.

    Args:
        pixels: uint8 [N, 3, H, W].
        captions: N texts, lines that are too long are cut; or none.
        columns: pictures per row.
        enlarged: by so many.
    """
    height, width = (enlarged * side for side in pixels.shape[2:])
    rows, below = -(-len(pixels) // columns), _CAPTION if captions else 0
    page = Image.new("RGB", (columns * width, rows * (height + below)), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(10)
    for i, (picture, text) in enumerate(zip(pixels, captions or [""] * len(pixels), strict=True)):
        left, top = i % columns * width, i // columns * (height + below)
        image = Image.fromarray(picture.permute(1, 2, 0).numpy())
        page.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, top))
        draw.multiline_text((left + 2, top + height + 1), text, "black", font, spacing=1)
    return page


def grid(rows: Mapping[str, Tensor], prompts: Sequence[str], headline: str, enlarged: int = 4) -> Image.Image:
    """Pictures of the same prompts, under a headline: prompts above the columns, names left of the rows.

    Args:
        rows: name -> uint8 [N, 3, H, W].
        prompts: N of them; wrapped to the width of a picture.
        headline: one line.
        enlarged: by so many.
    """
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
