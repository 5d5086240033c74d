"""Models of transformers by name, and the photos of a folder that one of them still has to look at."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from tqdm import tqdm

from ..base.errors import UserError
from ..base.run_log import bar_options
from .files import DatasetError, printable
from .images import read_photo

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
