"""Masks of garments for a folder of photos: from their alpha channels, else by a segmentation model of transformers.

One PNG for each photo, with its name and size, white where to train, in one folder: what `mask_path` reads.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from tqdm import tqdm

from ..base.errors import UserError
from ..base.files import replacing
from ..base.run_log import bar_options
from .files import DatasetError, printable
from .images import read_photo
from .masks import MASK_EXTENSIONS

CLOTHES_MODEL = "mattmdjaga/segformer_b2_clothes"
WANTED = ["*.json", "*.safetensors"]  # of a repository; no pickles, which can run code
LONGEST = 1024  # pixels of the map of labels; a model's own is coarser
# words in the labels of clothes parsers
GARMENTS = frozenset(
    """
    bag belt blazer blouse boot boots cape cardigan clothes clothing coat coats dress dresses glove gloves hat jacket
    jeans jumpsuit jumpsuits leggings pants scarf shirt shoe shoes shorts skirt skirts sock socks suit sweater
    sweatshirt tie tights top trousers upper vest
    """.split()  # noqa: SIM905 (a list of words reads better so)
)
FROM_ALPHA, BY_MODEL, KEPT, NOTHING, FAILED = "from alpha", "by the model", "kept", "nothing found", "failed"


class SegmentationError(UserError):
    """A model that cannot be loaded, or a label that it does not have."""


class Parser:
    """A model for semantic segmentation, by name or folder, and its labels that are garments: `labels`, or by name.

    Raises SegmentationError.
    """

    def __init__(self, name: str, labels: Collection[str] = (), device: torch.device | str = "cpu"):
        from huggingface_hub import snapshot_download
        from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation

        folder = name
        try:
            if not Path(name).is_dir():
                folder = snapshot_download(name, allow_patterns=WANTED)
            self._processor = AutoImageProcessor.from_pretrained(folder)
            self._model = AutoModelForSemanticSegmentation.from_pretrained(folder).eval().to(device)
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            reason = printable(str(error).strip().partition("\n")[0])
            raise SegmentationError(
                f"--model {name}: cannot be loaded ({reason}); run `hf download {name}` where there is a network "
                "(HF_ENDPOINT names a mirror of the Hub), or name a folder that has the model"
            ) from error
        known = {label: index for index, label in self._model.config.id2label.items()}
        self.labels = tuple(labels) or tuple(label for label in known if names_garment(label))
        if not self.labels:
            raise SegmentationError(
                f"--model {name}: no label is a garment's; write --labels with some of {list(known)}"
            )
        for label in self.labels:
            if label not in known:
                raise SegmentationError(f"--labels {label}: is not a label of {name}; write some of {list(known)}")
        self._garments = torch.tensor([known[label] for label in self.labels], device=device)

    @torch.no_grad()
    def mask(self, photo: Image.Image) -> Image.Image:
        """A mask (mode "L") of an RGB photo's size, black all over where none of the labels is seen."""
        scale = min(1.0, LONGEST / max(photo.size))
        width, height = (max(1, round(side * scale)) for side in photo.size)
        inputs = self._processor(images=photo, return_tensors="pt").to(self._garments.device)
        outputs = self._model(**inputs)
        (classes,) = self._processor.post_process_semantic_segmentation(outputs, target_sizes=[(height, width)])
        white = torch.isin(classes, self._garments).cpu().numpy()
        return Image.fromarray(white.astype(np.uint8) * 255).resize(photo.size, Image.Resampling.BILINEAR)


def names_garment(label: str) -> bool:
    """Whether a label names a garment, as "Upper-clothes" and "Left-shoe" do, and "Hair" does not."""
    return not GARMENTS.isdisjoint(re.findall("[a-z]+", label.lower()))


def draw_masks(photos: Sequence[Path], out: Path, load: Callable[[], Parser]) -> dict[str, list[str]]:
    """Write the masks that `out` lacks; returns the photos by what was done, the failed ones with the reason.

    `load` is called where a photo has no transparent parts. A mask that shows nothing is not written.
    """
    done: defaultdict[str, list[str]] = defaultdict(list)
    parser = None
    owners: dict[str, Path] = {}
    for photo in tqdm(photos, desc="Masks", leave=False, **bar_options()):
        name = printable(photo)
        owner = owners.setdefault(photo.stem, photo)
        if owner is not photo:
            done[FAILED].append(f"{name}: has the name of {printable(owner)}, as its mask would; rename one of them")
            continue
        if any(os.path.lexists(out / f"{photo.stem}{extension}") for extension in MASK_EXTENSIONS):
            done[KEPT].append(name)
            continue
        try:
            image, mask = read_photo(photo)
        except DatasetError as error:
            done[FAILED].append(str(error))
            continue
        way = FROM_ALPHA
        if mask is None:
            way = BY_MODEL
            parser = parser or load()
            mask = parser.mask(image)
        if mask.getbbox() is None:
            done[NOTHING].append(name)
            continue
        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / f"{photo.stem}.png", sync=False) as temp:
            mask.save(temp, format="PNG")
        done[way].append(name)
    return done
