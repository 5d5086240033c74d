"""Does the mini-FLUX draw what its prompt says? `python scripts/score_mini_flux.py [MODEL]`.

Draws prompts of combinations that were never trained on with diffusers' FluxPipeline, and lets the classifier of
`mini_flux/scorer.py` say what the pictures show. With `--lora FILE` it draws the garment the LoRA was trained on, its
trigger word in the garment's place. Some minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from mini_flux.experiment import TRIGGER, prompt_items
from mini_flux.pictures import HELD_OUT, Item
from mini_flux.samples import draw_prompts, load_pipeline, prompts_of, sheet, unseen_items
from mini_flux.scorer import ATTRIBUTES, accuracies, judge, load_scorer, right
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
SHOWN, COLUMNS = 24, 6


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "models" / "coat_mini_flux", metavar="MODEL")
    parser.add_argument("--count", type=int, default=200, metavar="N", help="prompts (default: 200)")
    parser.add_argument("--size", type=int, nargs=2, default=(64, 64), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and the noise (default: 0)")
    parser.add_argument("--lora", type=Path, metavar="FILE", help=f"a LoRA of the {HELD_OUT}")
    parser.add_argument("--trigger", default=TRIGGER, metavar="WORD", help=f"its trigger word (default: {TRIGGER})")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"PNG of the first {SHOWN}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def mistakes(found: Tensor, items: Sequence[Item], prompts: Sequence[str]) -> list[str]:
    """One line for each picture that is not as its prompt says."""
    lines, tables = [], list(ATTRIBUTES.values())
    for places, item, prompt in zip(found.tolist(), items, prompts, strict=True):
        seen = Item(*(table[place] for table, place in zip(tables, places, strict=True)))
        wrong = [f"{name} {got}" for name, got, want in zip(ATTRIBUTES, seen, item, strict=True) if got != want]
        if wrong:
            lines.append(f"  {prompt!r}: drew {', '.join(wrong)}")
    return lines


def main() -> None:
    """Draws, scores, shows."""
    options, started = parse_arguments(), time.monotonic()
    pipeline = load_pipeline(options.model)
    if options.lora:
        pipeline.load_lora_weights(options.lora.parent, weight_name=options.lora.name)
        items, trigger = prompt_items(options.count), options.trigger
    else:
        items, trigger = unseen_items(options.count, options.seed), None
    prompts = prompts_of(items, options.seed, trigger)
    pixels = draw_prompts(pipeline, prompts, tuple(options.size), options.seed)
    found = judge(load_scorer(), pixels)
    shares = accuracies(right(found, items))
    for line in mistakes(found, items, prompts):
        print(line)
    print(f"{len(items)} prompts, {options.size[0]}x{options.size[1]}, {time.monotonic() - started:.0f} s")
    print(f"| {' | '.join(shares)} |\n|{'---|' * len(shares)}")
    print(f"| {' | '.join(f'{share:.1%}' for share in shares.values())} |")
    if options.picture:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        captions = [f"{i.pattern} {i.colour}\n{i.garment}, {i.background}" for i in items[:SHOWN]]
        sheet(pixels[:SHOWN], captions, COLUMNS).save(options.picture, optimize=True)
        print(f"{options.picture}:")
        for prompt in prompts[:SHOWN]:
            print(f"  {prompt}")
    if options.json:
        options.json.write_text(json.dumps({"count": len(items), "accuracy": shares}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
