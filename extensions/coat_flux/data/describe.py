"""Drafts of captions for a folder of photos, by an image-to-text model of transformers.

One line beside each photo: `[trigger]`, then what the model says. A model with a chat template is asked for what is not
the garment. Florence-2 has tasks in place of questions and BLIP neither: they name the garment, too, for you to delete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image

from .captions import PLACEHOLDERS, caption_file
from .files import printable
from .pretrained import FAILED, ModelError, load_pretrained, unfinished

ABOUT = ("background", "pose", "light")
QUESTION = (
    "Describe this photo in one English sentence of at most 30 words: {}. Do not mention clothes, shoes, bags or "
    "jewelry, nor their colors."
)
TASKS = {"florence2": "<DETAILED_CAPTION>"}  # by type of model
MOST_TOKENS, LONGEST = 100, 1024  # of a caption; pixels of a photo, of which Qwen-VL makes tokens
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
