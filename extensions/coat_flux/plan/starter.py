"""A first YAML for a folder of photos and a card: the best shipped config, with edited lines and their reasons."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ..config.findings import ConfigError
from ..config.job import JobConfig
from ..config.job_file import parse, shipped_folder
from ..config.rules import BUCKET_STEP
from ..data.captions import PLACEHOLDERS, read_caption
from ..data.files import DatasetError, find_images
from ..data.images import PhotoFacts, survey
from .cards import CardFit
from .job import JobFacts
from .predict import predict
from .speed import Card

PLACEHOLDER = "PUT_THE_FOLDER_OF_YOUR_PHOTOS_HERE"
# best first, and the smallest card that each is for, GB; smaller ones have one of their own
CANDIDATES = {
    "flux_clothing_coat_80gb.yaml": 0,
    "flux_clothing_coat.yaml": 0,
    "flux_clothing_coat_16gb.yaml": 14,
    "flux_clothing_coat_12gb.yaml": 10,
    "flux_clothing_coat_8gb.yaml": 0,
}
CONSONANTS = "bcdfghjklmnpqrstvwxz"
WORD_LETTERS = (4, 6)
VIEWS = 100  # per photo: typical for a LoRA of a garment at lr 1e-4
FEWEST, MOST = 1000, 3000  # photos shown in all: fewer do not move a LoRA, more only repeat
FEWEST_STEPS = 500
ENLARGED = 1.05  # a photo this much smaller than a resolution still counts as large enough
SMALLEST = 256
MAX_PROMPT = 200


class Photos:
    """A folder of photos, each of which is read; raises DatasetError if there is none, or one cannot be read.

    `sides`: sqrt(width · height) of each, pixels. `caption`: one of the captions, or None.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise DatasetError(f"{folder}: folder not found; name the folder of your photos")
        paths = find_images(folder)
        if not paths:
            raise DatasetError(f"{folder}: has no photos (.jpg, .jpeg, .png, .webp); name the folder of your photos")
        self.folder, self.sides = folder.resolve(), list[float]()
        errors = []
        for photo in survey(paths).values():
            if isinstance(photo, DatasetError):
                errors.append(str(photo))
            elif isinstance(photo, PhotoFacts):
                self.sides.append(math.sqrt(math.prod(photo.size)))
        if errors:
            raise DatasetError("\n".join(errors))
        self.caption = next((text for text in map(read_caption, paths) if text), None)


def made_up_word(name: str) -> str:
    """A word no model knows, fixed for each name: 4 to 6 of its consonants, padded from its hash."""
    letters = "".join(letter for letter in name.lower() if letter in CONSONANTS)[: WORD_LETTERS[1]]
    filler = (CONSONANTS[byte % len(CONSONANTS)] for byte in hashlib.sha256(name.encode()).digest())
    return letters + "".join(next(filler) for _ in range(WORD_LETTERS[0] - len(letters)))


def make_starter(photos: Photos | None, card: Card, name: str, trigger: str, file: str) -> tuple[str, str, CardFit]:
    """The best shipped config that fits the card, else the one that needs least: edited text, its file, the verdict.

    Without photos a placeholder is left, which `check` refuses. Raises ConfigError for an invalid name or trigger
    word.
    """
    tried, configs = [], shipped_folder("configs")
    for origin, smallest in CANDIDATES.items():
        if card.gb < smallest:
            continue
        if configs is None or not (configs / origin).is_file():
            raise ConfigError(f"{origin}: not part of this installation; install coat-flux from a wheel or a checkout")
        text = _written((configs / origin).read_text(encoding="utf-8"), photos, card, name, trigger, file)
        facts = JobFacts(JobConfig.from_dict(parse(text, file), file=file))
        peak = predict(facts, card.gb * 1e9).peak
        tried.append((peak, text, origin, facts))
        if peak <= card.room:
            break
    else:
        tried.sort(key=lambda made: -made[0])
    _, text, origin, facts = tried[-1]
    return text, origin, CardFit(facts, card)


def _written(text: str, photos: Photos | None, card: Card, name: str, trigger: str, file: str) -> str:
    batch = int(_value(text, "batch_size"))
    resolutions = json.loads(_value(text, "resolution"))
    count = 0 if photos is None else len(photos.sides)
    steps, why_steps = _steps(count, batch)
    sizes, why_sizes = _resolutions(resolutions, photos)
    every = 250 if steps >= FEWEST else FEWEST_STEPS // 4
    folder = PLACEHOLDER if photos is None else photos.folder.as_posix()
    lines = {
        "name": (name, "folder and file name of the result"),
        "training_folder": ("output", f"the run is saved in output/{name}/"),
        "trigger_word": (trigger, "a word the model does not know; [trigger] in captions and prompts becomes this"),
        "folder_path": (folder, "your photos: image.jpg with image.txt next to it"),
        "resolution": (sizes, why_sizes),
        "steps": (steps, why_steps),
        "save_every": (every, "steps; every save is a LoRA you can use"),
        "sample_every": (every, "steps from one set of pictures to the next"),
    }
    for key, (value, comment) in lines.items():
        text = _replace(text, key, value, comment)
    head = f"# A LoRA for FLUX.1-dev with COAT on a {card.gb:g} GB card, written by `coat-flux new`."
    start, rest = text.split("\n#\n", 1)
    origin = start.split("# ", 1)[1]
    rest = re.sub(r"configs/\w+\.yaml", lambda _: file, rest, count=2)
    return _with_prompts(f"---\n{head}\n# Made from: {origin}\n#\n{rest}", photos)


def _value(text: str, key: str) -> str:
    found = re.search(rf"^[ -]*{key}: *(.*?)(?:  #.*)?$", text, re.MULTILINE)
    assert found is not None, key
    return found[1]


def _replace(text: str, key: str, value: object, comment: str) -> str:
    line = f"{json.dumps(value, ensure_ascii=False)}  # {comment}"
    text, count = re.subn(rf"^([ -]*{key}: ).*$", lambda found: found[1] + line, text, count=1, flags=re.MULTILINE)
    assert count == 1, key
    return text


def _steps(count: int, batch: int) -> tuple[int, str]:
    if not count:
        why = f"about {VIEWS} views of each photo, at least {FEWEST} and at most {MOST} in all"
        return max(1500 // batch, FEWEST_STEPS), why
    views = min(max(VIEWS * count, FEWEST), MOST)
    steps = max(math.ceil(views / batch / 50) * 50, FEWEST_STEPS)
    rule = f"about {VIEWS} teach a garment, at least {FEWEST} and at most {MOST} in all"
    return steps, f"{round(steps * batch / count)} views of each of {count} photos: {rule}"


def _resolutions(offered: Sequence[int], photos: Photos | None) -> tuple[list[int], str]:
    """The config's resolutions that half of the photos reach: a photo is never enlarged."""
    if photos is None:
        return list(offered), "each photo is used at each of these sizes; aspect ratios are kept"
    typical = median(photos.sides)
    sizes = [size for size in offered if size <= typical * ENLARGED]
    reason = f"half of the photos are {typical:.0f}×{typical:.0f} or larger"
    if sizes == list(offered):
        return sizes, f"each photo at each of these sizes, aspect ratio kept; {reason}"
    if sizes:
        left_out = ", ".join(str(size) for size in offered if size not in sizes)
        return sizes, f"not {left_out}: {reason}, none is enlarged"
    lower = max(int(typical) // BUCKET_STEP * BUCKET_STEP, SMALLEST)
    return [lower], f"small: {reason}, none is enlarged; larger photos make a better LoRA"


def _with_prompts(text: str, photos: Photos | None) -> str:
    if photos is None or photos.caption is None:
        return text
    caption = " ".join(photos.caption.split())[:MAX_PROMPT]
    if not any(word in caption for word in PLACEHOLDERS):
        caption = f"[trigger], {caption}"
    line = json.dumps(re.sub(r"\s--(?=[a-z])", " ", caption), ensure_ascii=False) + "  # a caption of your photos"
    return re.sub(r"^( +- )\".*$", lambda found: found[1] + line, text, count=1, flags=re.MULTILINE)
