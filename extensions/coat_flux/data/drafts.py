"""Drafts for a folder of photos, by models of transformers: masks of the garment, and captions.

A mask is one PNG for each photo, with its name and size, white where to train, in one folder: what `mask_path` reads.
It is the photo's alpha channel, else a segmentation model draws it. A caption is one line beside each photo:
`[trigger]`, then what an image-to-text model says. One with a chat template is asked for what is not the garment.
Florence-2 has tasks in place of questions and BLIP neither: they name the garment, too, for you to delete.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from tqdm import tqdm

from ..base.errors import UserError
from ..base.files import replacing
from ..base.run_log import bar_options
from .captions import PLACEHOLDERS, caption_file
from .files import DatasetError, printable
from .images import read_photo
from .masks import MASK_EXTENSIONS

# of a repository: weights, settings, vocabularies; no pickles, which can run code
WANTED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
KEPT, FAILED = "kept", "failed"  # what became of a photo


class ModelError(UserError):
    """A model that cannot be loaded or does not do what was asked."""


def load_pretrained(name: str, auto: str, task: str, device: str, processor: str = "AutoProcessor") -> tuple[Any, Any]:
    """The processor and the model of a Hub name or a folder, by the names of their Auto classes; raises ModelError.

    `task`: what such models do. No code of a repository is run. The weights are fp32 on a CPU, else as saved.
    """
    import transformers
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    from transformers.utils import is_torchvision_available

    http_error = HfHubHTTPError.__base__  # of the library that the Hub's uses, such as a proxy's
    own = {"trust_remote_code": False}
    try:
        folder = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=WANTED)
        config = transformers.AutoConfig.from_pretrained(folder, **own)
        model_class = getattr(transformers, auto)
        if type(config) not in model_class._model_mapping:
            raise ModelError(f"--model {name}: is of another kind ({config.model_type}); name a model that {task}")
        kind = None if is_torchvision_available() else transformers.PROCESSOR_MAPPING.get(type(config), None)
        if kind and "video_processor" in inspect.signature(kind.__init__).parameters:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **own)
            images = transformers.AutoImageProcessor.from_pretrained(folder, **own)
            # the constructor refuses None for the part for videos, which transformers has with torchvision only
            kind = type("ImagesOnly", (kind,), {"check_argument_for_proper_class": lambda *_: None})
            reader = kind(images, tokenizer, chat_template=tokenizer.chat_template)
        else:
            reader = getattr(transformers, processor).from_pretrained(folder, **own)
        dtype = torch.float32 if device == "cpu" else "auto"
        return reader, model_class.from_pretrained(folder, dtype=dtype, **own).eval().to(device)
    except (HFValidationError, RepositoryNotFoundError) as error:
        text = "is neither a folder nor a model of the Hub that you may read"
        remedy = "correct the name, or accept its license on its page and run `hf auth login`"
        raise ModelError(f"--model {name}: {text}; {remedy}") from error
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, http_error) as error:
        reason = printable(str(error).strip().partition("\n")[0])
        raise ModelError(
            f"--model {name}: cannot be loaded ({reason}); run `hf download {name}` where there is a network "
            f"(HF_ENDPOINT names a mirror of the Hub), or name a folder with a model that {task}, in safetensors"
        ) from error


def unfinished(
    photos: Sequence[Path], results: Callable[[Path], Iterable[Path]], done: dict[str, list[str]], label: str
) -> Iterator[tuple[Path, Image.Image, Image.Image | None]]:
    """The photos that have none of their `results` yet, as `read_photo` reads them; `done` gets the others."""
    for photo in tqdm(photos, desc=label, leave=False, **bar_options()):
        if any(os.path.lexists(path) for path in results(photo)):
            done[KEPT].append(printable(photo))
            continue
        try:
            image, opacity = read_photo(photo)
        except DatasetError as error:
            done[FAILED].append(str(error))
            continue
        yield photo, image, opacity


LONGEST = 1024  # pixels of the map of labels, and of a photo, of which Qwen-VL makes tokens
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
        self.labels = tuple(labels)
        if not labels:  # words of a label are apart in "Upper-clothes" and "Left-shoe"
            self.labels = tuple(label for label in known if GARMENTS.intersection(re.findall("[a-z]+", label.lower())))
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


ABOUT = ("background", "pose", "light")
QUESTION = (
    "Describe this photo in one English sentence of at most 30 words: {}. Do not mention clothes, shoes, bags or "
    "jewelry, nor their colors."
)
TASKS = {"florence2": "<DETAILED_CAPTION>"}  # by type of model
MOST_TOKENS = 100  # of a caption
WRITTEN = "written"


class Captioner:
    """A model that describes images, by name or folder; asked `about` some sides of a photo, if it can be asked.

    `prompt` is what the model reads beside the photo, None if it reads nothing. Raises ModelError.
    """

    def __init__(self, name: str, about: Sequence[str] = (), device: str = "cpu"):
        loaded = load_pretrained(name, "AutoModelForImageTextToText", "describes images", device)
        self._processor, self._model = loaded
        self.prompt = TASKS.get(self._model.config.model_type)
        if getattr(self._processor, "chat_template", None):
            question = QUESTION.format(", ".join(about or ABOUT))
            chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            self.prompt = self._processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        elif about:
            remedy = "leave it out, or name a --model with a chat template, such as Qwen/Qwen2.5-VL-3B-Instruct"
            raise ModelError(f"--about {','.join(about)}: {name} cannot be asked; {remedy}")

    @torch.no_grad()
    def describe(self, photo: Image.Image) -> str:
        """What the model says of an RGB photo, as one line; it may be empty."""
        image = photo.copy()
        image.thumbnail((LONGEST, LONGEST))
        prompts = {"text": [self.prompt]} if self.prompt else {}
        inputs = self._processor(images=[image], return_tensors="pt", **prompts)
        inputs = inputs.to(self._model.device, self._model.dtype)
        tokens = self._model.generate(**inputs, max_new_tokens=MOST_TOKENS, do_sample=False)
        if self.prompt and not self._model.config.is_encoder_decoder:
            tokens = tokens[:, inputs["input_ids"].shape[1] :]  # the answer follows the prompt
        (text,) = self._processor.batch_decode(tokens, skip_special_tokens=True)
        return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def draft_captions(photos: Sequence[Path], extension: str, load: Callable[[], Captioner]) -> dict[str, list[str]]:
    """Write the captions that photos lack; returns by what was done the photos, with their captions or the reason.

    `load` is called at the first photo without a caption.
    """
    done: defaultdict[str, list[str]] = defaultdict(list)
    captioner = None
    for photo, image, _ in unfinished(photos, lambda path: [caption_file(path, extension)], done, "Captions"):
        captioner = captioner or load()
        text = captioner.describe(image)
        if not text:
            done[FAILED].append(f"{printable(photo)}: the model says nothing of it; write its caption yourself")
            continue
        caption = f"{PLACEHOLDERS[0]}, {text}"
        with caption_file(photo, extension).open("x", encoding="utf-8", newline="\n") as file:
            file.write(caption + "\n")
        done[WRITTEN].append(f"{printable(photo)}: {caption}")
    return done
