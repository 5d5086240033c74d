"""A first YAML for a folder of photos and a card: the best shipped config, with edited lines and their reasons."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from ..config.findings import ConfigError
from ..config.job import JobConfig
from ..config.job_file import parse, shipped_folder
from ..data.buckets import STEP
from ..data.captions import PLACEHOLDERS, read_caption
from ..data.files import DatasetError, Listing
from ..data.images import PhotoFacts, survey
from ..data.preflight import SMALL_SHARE, check_data
from .cards import CardFit
from .job import JobFacts
from .predict import predict
from .speed import FIRST_FP8, GEFORCE, Card

PLACEHOLDER = "PUT_THE_FOLDER_OF_YOUR_PHOTOS_HERE"
ON_CPU, NVFP4 = "flux_clothing_tiny.yaml", "flux_clothing_coat_16gb.yaml"
# best first, and the smallest card that each is for, GB; smaller ones have one of their own
CANDIDATES = {
    "flux_clothing_coat_80gb.yaml": 0,
    "flux_clothing_coat.yaml": 0,
    NVFP4: 14,
    "flux_clothing_coat_12gb.yaml": 10,
    "flux_clothing_coat_8gb.yaml": 0,
}
CONSONANTS = "bcdfghjklmnpqrstvwxz"
WORD_LETTERS = (4, 6)
VIEWS = 100  # per photo: typical for a LoRA of a garment at lr 1e-4
FEWEST, MOST = 1000, 3000  # photos shown in all: fewer do not move a LoRA, more only repeat
FEWEST_STEPS = 500
SMALLEST = 256
MAX_PROMPT, CAPTIONS_DRAWN = 200, 3
PROMPTS = (  # that fit any product
    "[trigger], product photo on a white background",
    "[trigger] on a wooden table, soft daylight",
    "[trigger] in a street, evening light",
)
RAM_SHARE = 0.9  # of CPU memory that a run may fill


class Photos:
    """A folder of photos, all of which are read; raises DatasetError."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise DatasetError(f"{folder}: folder not found; name the folder of your photos")
        listing = Listing(folder)
        paths = listing.images
        if not paths:
            rule = "has no photos (.jpg, .jpeg, .png, .webp)"
            text = f"{folder}: {rule}; name the folder of your photos"
            raise DatasetError("\n".join([text, *listing.warnings]))
        self.folder, self.sides = folder.resolve(), list[float]()  # sqrt(width · height), pixels, sorted
        errors = []
        for photo in survey(paths).values():
            if isinstance(photo, DatasetError):
                errors.append(str(photo))
            elif isinstance(photo, PhotoFacts):
                self.sides.append(math.sqrt(math.prod(photo.size)))
        if errors:
            raise DatasetError("\n".join(errors))
        self.sides.sort()
        self.captions = [text for text in map(read_caption, paths) if text]


def made_up_word(name: str, captions: Sequence[str] = ()) -> str:
    """A word no model or caption has: 4 to 6 consonants of the name, padded from its hash."""
    word = "".join(letter for letter in name.lower() if letter in CONSONANTS)[: WORD_LETTERS[1]]
    taken = "\n".join(captions).lower()
    for byte in hashlib.sha256(name.encode()).digest():
        if len(word) >= WORD_LETTERS[0] and word not in taken:
            break
        word += CONSONANTS[byte % len(CONSONANTS)]
    return word


def make_starter(
    photos: Photos | None,
    card: Card | None,
    name: str,
    trigger: str,
    file: str,
    ram_gb: float = math.inf,
) -> tuple[str, str, CardFit | None, list[str]]:
    """The best shipped config that fits card and CPU memory, else the nearest; or that for CPUs.

    Returns its edited text, its file, the verdict for the card, and warnings about the photos. Raises ConfigError and
    DatasetError.
    """
    tried, configs = [], shipped_folder("configs")
    origins = [ON_CPU] if card is None else list(CANDIDATES)
    if card is not None:  # those for larger cards last, without FP8 the one that needs it
        old = card.capability < FIRST_FP8
        origins.sort(key=lambda origin: (old and origin == NVFP4, card.gb < CANDIDATES[origin]))
    for origin in origins:
        if configs is None or not (configs / origin).is_file():
            raise ConfigError(f"{origin}: not part of this installation; install coat-flux from a wheel or a checkout")
        text = _written((configs / origin).read_text(encoding="utf-8"), photos, card, name, trigger, file)
        facts = JobFacts(JobConfig.from_dict(parse(text, file), file=file))
        if card is None:
            break
        prediction = predict(facts, card.gb * 1e9)
        excess = max(0.0, prediction.peak - card.room)
        tried.append((excess, prediction.ram_bytes, text, origin, facts))
        if not excess and prediction.ram_bytes <= ram_gb * 1e9 * RAM_SHARE:
            break
    else:
        _, _, text, origin, facts = min(tried, key=lambda made: made[:2])
    errors, warnings = ([], []) if photos is None else check_data(parse(text, file))
    if errors:
        raise DatasetError("\n".join(errors))
    return text, origin, None if card is None else CardFit(facts, card), warnings


def _written(text: str, photos: Photos | None, card: Card | None, name: str, trigger: str, file: str) -> str:
    process = parse(text, file)["config"]["process"][0]
    batch, resolutions = process["train"]["batch_size"], process["datasets"][0]["resolution"]
    steps, why_steps = max(1500 // batch, FEWEST_STEPS), ""
    if photos is not None:
        count = len(photos.sides)
        views = min(max(VIEWS * count, FEWEST), MOST)
        steps = max(math.ceil(views / batch / 50) * 50, FEWEST_STEPS)
        each = round(steps * batch / count)
        why_steps = f"{each} views of each of {count} photos: about {VIEWS} teach a garment"
    sizes, why_sizes = _resolutions(resolutions, photos)
    every = 250 if steps >= FEWEST else FEWEST_STEPS // 4
    folder = PLACEHOLDER if photos is None else photos.folder.as_posix()
    text = _replace(text, "name", name)
    text = _replace(text, "training_folder", "output", f"the run is saved in output/{name}/")
    text = _replace(text, "trigger_word", trigger)
    text = _replace(text, "folder_path", folder)
    if card is not None:
        text = _replace(text, "resolution", sizes, why_sizes)
        text = _replace(text, "steps", steps, why_steps)
        text = _replace(text, "save_every", every)
        text = _replace(text, "sample_every", every)
    if card is not None and (card.capability < FIRST_FP8 or card.capability in GEFORCE):
        auto = r"\1auto  # e4m3 or int8, activations too: what this card multiplies faster, timed before the load"
        text = re.sub(r"^( +weight:.*\n +use_fp8:.*\n +format: )(?!nvfp4).*$", auto, text, flags=re.MULTILINE)
    place = "the mini-FLUX with COAT on a CPU"
    if card is not None:
        place = f"FLUX.1-dev with COAT on a {card.gb:g} GB card"
    head = f"# A LoRA for {place}, written by `coat-flux new`."
    start, rest = text.split("\n#\n", 1)
    origin = start.split("# ", 1)[1]
    rest = re.sub(r"configs/\w+\.yaml", lambda _: file, rest, count=2)
    block = "        prompts:  # what to draw; write your own\n"
    for prompt in _prompts([] if photos is None else photos.captions):
        block += f"          - {json.dumps(prompt, ensure_ascii=False)}\n"
    rest = re.sub(r"^ +prompts:.*\n( +- .*\n)+", lambda _: block, rest, count=1, flags=re.MULTILINE)
    return f"---\n{head}\n# Made from: {origin}\n#\n{rest}"


def _replace(text: str, key: str, value: object, comment: str = "") -> str:
    """Put a value, and a comment if there is one, in place of a key's."""
    found = re.search(rf"^[ -]*{key}: (.*?)(  # .*)?$", text, re.MULTILINE)
    assert found is not None, key
    line = json.dumps(value, ensure_ascii=False)
    line += f"  # {comment}" if comment else found[2] or ""
    return text[: found.start(1)] + line + text[found.end() :]


def _resolutions(offered: Sequence[int], photos: Photos | None) -> tuple[list[int], str]:
    """The config's resolutions for which nine in ten photos are large enough."""
    if photos is None:
        return list(offered), ""
    small = photos.sides[len(photos.sides) // 10]
    sizes = [size for size in offered if size * math.sqrt(SMALL_SHARE) <= small]
    reason = f"nine in ten photos are {small:.0f}×{small:.0f} or larger"
    if sizes == list(offered):
        return sizes, f"each photo at each of these; {reason}"
    if sizes:
        left_out = ", ".join(str(size) for size in offered if size not in sizes)
        return sizes, f"not {left_out}: {reason}"
    lower = max(int(small) // STEP * STEP, SMALLEST)
    return [lower], f"small: {reason}, larger photos make a better LoRA"


def _prompts(captions: Sequence[str]) -> list[str]:
    """Of a few captions, evenly spaced, then those that fit any product."""
    apart, prompts = max(1, len(captions) // CAPTIONS_DRAWN), []
    for caption in captions[::apart][:CAPTIONS_DRAWN]:
        text = " ".join(caption.split())[:MAX_PROMPT]
        if not any(word in text for word in PLACEHOLDERS):
            text = f"[trigger], {text}"
        prompts.append(re.sub(r"\s--(?=[a-z])", " ", text))
    return [*dict.fromkeys(prompts), *PROMPTS][: CAPTIONS_DRAWN + 1]
