"""Masks of garments for a folder of photos: from their alpha channels, else by a segmentation model of transformers.

One PNG for each photo, with its name and size, white where to train, in one folder: what `mask_path` reads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..base.files import replacing
from .files import printable
from .masks import MASK_EXTENSIONS
from .pretrained import FAILED, ModelError, load_pretrained, unfinished

LONGEST = 1024  # pixels of the map of labels; a model's own is coarser
# words in the labels of clothes parsers
GARMENTS = frozenset(
    """
    bag belt blazer blouse boot boots cape cardigan clothes clothing coat coats dress dresses glove gloves hat jacket
    jeans jumpsuit jumpsuits leggings pants scarf shirt shoe shoes shorts skirt skirts sock socks suit sweater
    sweatshirt tie tights top trousers upper vest
    """.split()  # noqa: SIM905 (a list of words reads better so)
)
FROM_ALPHA, BY_MODEL, NOTHING = "from alpha", "by the model", "nothing found"


class Parser:
    """A model for semantic segmentation, by name or folder, and its labels that are garments: `labels`, or by name.

    Raises ModelError.
    """

    def __init__(self, name: str, labels: Collection[str] = (), device: str = "cpu"):
        task, processor = "labels the parts of images", "AutoImageProcessor"
        loaded = load_pretrained(name, "AutoModelForSemanticSegmentation", task, device, processor)
        self._processor, self._model = loaded
        known = {label: index for index, label in self._model.config.id2label.items()}
        self.labels = tuple(labels) or tuple(label for label in known if names_garment(label))
        if not self.labels:
            raise ModelError(f"--model {name}: no label is a garment's; write --labels with some of {list(known)}")
        for label in self.labels:
            if label not in known:
                raise ModelError(f"--labels {label}: is not a label of {name}; write some of {list(known)}")
        self._garments = torch.tensor([known[label] for label in self.labels], device=device)

    @torch.no_grad()
    def mask(self, photo: Image.Image) -> Image.Image:
        """A mask (mode "L") of an RGB photo's size, black all over where none of the labels is seen."""
        scale = min(1.0, LONGEST / max(photo.size))
        width, height = (max(1, round(side * scale)) for side in photo.size)
        inputs = self._processor(images=photo, return_tensors="pt").to(self._model.device, self._model.dtype)
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
    for photo in photos:
        owner = owners.setdefault(photo.stem, photo)
        if owner is not photo:
            text = f"has the name of {printable(owner)}, as its mask would; rename one of them"
            done[FAILED].append(f"{printable(photo)}: {text}")
    for photo, image, mask in unfinished(
        list(owners.values()), lambda photo: [out / f"{photo.stem}{end}" for end in MASK_EXTENSIONS], done, "Masks"
    ):
        way = FROM_ALPHA
        if mask is None:
            way = BY_MODEL
            parser = parser or load()
            mask = parser.mask(image)
        if mask.getbbox() is None:
            done[NOTHING].append(printable(photo))
            continue
        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / f"{photo.stem}.png", sync=False) as temp:
            mask.save(temp, format="PNG")
        done[way].append(printable(photo))
    return done
