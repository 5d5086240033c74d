"""The model of a job, inspected without weights or a network: is it there, whole, of the right kind; and the device."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .checkpoint_file import DEV, IN_CHANNELS, SUFFIXES, CheckpointError, base_model, flux_config, kind_of, read_header
from .entry import STANDALONE
from .findings import Findings, closest

EMBEDDED = "coat_mini_flux"  # the name in tiny_flux.EMBEDDED_MODEL, whose import needs torch
PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
FLUX2_PARTS = tuple(part for part in PARTS if not part.endswith("_2"))
# a pipeline's class → the archs as which the stand-alone trainer trains it
PIPELINES = {
    **dict.fromkeys(("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"), ("flux",)),
    "Flux2Pipeline": ("flux2",),
    "Flux2KleinPipeline": ("flux2_klein_4b", "flux2_klein_9b"),
}
FLUX2_PIPELINES = ("Flux2Pipeline", "Flux2KleinPipeline")
STANDALONE_ARCHS = tuple(dict.fromkeys(arch for archs in PIPELINES.values() for arch in archs))
# a pipeline's class in model_index.json → ai-toolkit's arch for it
ARCHS = {
    "FluxPipeline": "flux",
    "FluxKontextPipeline": "flux_kontext",
    "Flux2Pipeline": "flux2",
    "ChromaPipeline": "chroma",
    "StableDiffusionPipeline": "sd1",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusion3Pipeline": "sd3",
    "PixArtSigmaPipeline": "pixart_sigma",
    "AuraFlowPipeline": "auraflow",
    "Lumina2Pipeline": "lumina2",
    "QwenImagePipeline": "qwen_image",
    "QwenImageEditPipeline": "qwen_image_edit",
    "ZImagePipeline": "zimage",
    "HiDreamImagePipeline": "hidream",
}
# repositories of black-forest-labs that ask for an agreement, and what they are where that is not FLUX.1-dev
GATED = {
    "FLUX.1-dev": "flux",
    "FLUX.1-Kontext-dev": "flux_kontext",
    "FLUX.1-Fill-dev": "FLUX.1 Fill",
    "FLUX.1-Depth-dev": "FLUX.1 Depth",
    "FLUX.1-Canny-dev": "FLUX.1 Canny",
    "FLUX.1-Redux-dev": "FLUX.1 Redux",
    "FLUX.1-Krea-dev": "flux",
    "FLUX.2-dev": "flux2",
    "FLUX.2-klein-9B": "flux2_klein_9b",
    "FLUX.2-klein-base-9B": "flux2_klein_9b",
}
BFL = "black-forest-labs"
KNOWN = (*GATED, "FLUX.1-schnell", "FLUX.2-klein-4B", "FLUX.2-klein-base-4B")
FLUX_ARCHS = ("flux", "flux_kontext")
TEXT_WIDTH = "joint_attention_dim"
FLUX2_LAYERS = 3  # of the text encoder, whose states are the embeddings
# arch → the file that ai-toolkit loads from a folder, whatever else is in it
CHECKPOINTS = {
    "flux2": "flux2-dev.safetensors",
    "flux2_klein_4b": "flux-2-klein-base-4b.safetensors",
    "flux2_klein_9b": "flux-2-klein-base-9b.safetensors",
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LEGACY = {"is_flux": "flux", "is_xl": "sdxl", "is_v2": "sd2", "is_v3": "sd3", "is_pixart": "pixart"} | {
    f"is_{name}": name for name in ("pixart_sigma", "auraflow", "lumina2", "vega", "ssd")
}


def arch_of(model: Mapping[str, Any]) -> str:
    """The architecture that the block `model` of a job asks ai-toolkit for."""
    arch = str(model.get("arch") or "").split(":")[0]
    arch = arch or next((name for key, name in _LEGACY.items() if model.get(key) is True), "sd1")
    return "flux" if arch == "flex1" else arch


def check_device(device: Any, path: str, findings: Findings) -> None:
    """Refuse a GPU that torch does not find: FLUX would train on the CPU, for weeks.

    Args:
        device: as configured.
        path: its key.
        findings: receives the error.
    """
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in ("cuda", "mps"):
        return
    import torch

    backend = torch.backends.mps if kind == "mps" else torch.cuda
    remedy = "run it on a machine with one, or write device: cpu"
    if not backend.is_available():
        built = torch.version.cuda or torch.version.hip or kind == "mps"
        rule = f"torch finds no {kind} device here" if built else "the installed torch is built without CUDA"
        remedy = remedy if built else "install one with CUDA (pytorch.org), or write device: cpu"
        findings.add(path, f"{rule}, so the run would be on the CPU; {remedy}", device)
    elif kind == "cuda" and index.isdecimal() and int(index) >= torch.cuda.device_count():
        findings.add(path, f"torch finds {torch.cuda.device_count()} GPUs here, counted from 0; write cuda:0", device)


def check_model(
    model: Mapping[str, Any], path: str, findings: Findings, trainer: str, toolkit_root: Path | None = None
) -> None:
    """Add what would stop a trainer while it loads the model, or let it train another one than is meant.

    Args:
        model: the block `model` of a job without config errors.
        path: its key.
        findings: receives errors and warnings.
        trainer: who would load it: `standalone` or `ai-toolkit`, which takes other things.
        toolkit_root: ai-toolkit's folder, whose `.env` may hold the hub's token.
    """
    _Model(model, path, findings, trainer == STANDALONE, toolkit_root).check()


class _Model:
    """The rules, with what they share."""

    def __init__(self, model: Mapping[str, Any], path: str, findings: Findings, alone: bool, root: Path | None):
        self.name, self.extras = str(model["name_or_path"]), model.get("extras_name_or_path")
        self.own_vae = model.get("vae_path") is not None
        self.place, self.arch, self.alone, self.root = Path(self.name), arch_of(model), alone, root
        self.key, self.findings = f"{path}.name_or_path", findings

    def add(self, text: str) -> None:
        self.findings.add(self.key, text, self.name)

    def check(self) -> None:
        name, place = self.name, self.place
        if place.name == EMBEDDED and not place.exists():
            return  # made when the run starts
        if re.match(r"https?:", name):
            if self.alone or "civitai.com" not in name:
                self.add("is a web address; write the repository's name, as owner/name, or a downloaded file or folder")
        elif place.is_dir():
            self._check_folder()
        elif place.exists():
            self._check_file()
        elif _HUB_NAME.fullmatch(name) and not Path(name.split("/")[0]).is_dir():
            self._check_hub(name, self.key)
        else:
            self._check_missing(name, self.key)

    # -- a folder ------------------------------------------------------------------------------------------------------

    def _check_folder(self) -> None:
        needed = None if self.alone else CHECKPOINTS.get(self.arch)
        if needed:
            if not (self.place / needed).is_file():
                self.add(f"has no {needed}, which ai-toolkit loads for {self.arch}; give the folder of that file")
            return
        pipeline = _json(self.place / "model_index.json").get("_class_name")
        own = _json(self.place / "config.json").get("_class_name")
        if not pipeline and not (self.place / "transformer").is_dir() and not (self.place / "unet").is_dir():
            self._check_no_model(own)
            return
        if isinstance(pipeline, str) and self._check_pipeline(pipeline):
            return
        if self.alone and self.arch not in FLUX_ARCHS:
            self._check_flux2_folder()
        elif self.alone or self.arch in FLUX_ARCHS:
            self._check_flux_folder()

    def _check_no_model(self, own: Any) -> None:
        """A folder that is not in diffusers layout: perhaps one in or around it is."""
        snapshots = sorted(self.place.glob("snapshots/*/model_index.json"))
        files = sorted(path.name for path in self.place.iterdir() if path.suffix.lower() in SUFFIXES)
        if own is not None:
            self.add(f"is only the {own} of a model; give the folder around it, {self.place.resolve().parent}")
        elif snapshots:
            self.add(f"is the hub's cache of a model; give {snapshots[0].parent}, or the model's name on the hub")
        elif files and (self.alone or self.arch not in FLUX_ARCHS):
            self.add(f"is not a folder in diffusers layout; give that, or one file, such as {self.place / files[0]}")
        else:
            self.add("is not a folder in diffusers layout, it has no model_index.json; give that of a downloaded model")

    def _check_pipeline(self, pipeline: str) -> bool:
        """Whether the folder's pipeline was refused."""
        arch, ours = ARCHS.get(pipeline), PIPELINES.get(pipeline)
        if self.alone and ours is None:
            where = f", or train it inside ai-toolkit with model.arch: {arch}" if arch else ""
            rule = f"is a {pipeline}, and the stand-alone trainer trains FLUX.1 and FLUX.2"
            self.add(f"{rule}; give a folder of one of them{where}")
        elif self.alone and ours is not None and self.arch not in ours:
            rule = f"is a {pipeline}, which does not fit arch {self.arch}"
            self.add(f"{rule}; write model.arch: {' or '.join(ours)}, or another folder")
        elif not self.alone and arch not in (None, self.arch) and self.arch in ARCHS.values():
            self.add(
                f"is a {pipeline}, which does not fit arch {self.arch}; write model.arch: {arch}, or another folder"
            )
        return not self.findings.sound(self.key)

    def _check_flux_folder(self) -> None:
        base = self.place
        if (
            self.extras
            and (self.alone or self.arch == "flux_kontext")
            and (self.alone or not (base / "text_encoder").exists())
        ):
            base = Path(str(self.extras))
        config = _json(self.place / "transformer" / "config.json")
        if not self._check_part(self.place, "transformer") or self._check_transformer(config):
            return
        if not base.is_dir():
            self._check_hub(str(base), self.key.replace("name_or_path", "extras_name_or_path"))
            return
        for part in PARTS[1:]:
            if not (part == "vae" and self.own_vae) and not self._check_part(base, part):
                return
        widths = {
            "text_encoder_2": ("d_model", "joint_attention_dim"),
            "text_encoder": ("hidden_size", "pooled_projection_dim"),
        }
        for part, (theirs, ours) in widths.items():
            width = _json(base / part / "config.json").get(theirs)
            if width and config.get(ours) and width != config[ours]:
                self.add(f"{part} gives {width} features and the transformer takes {config[ours]}; give FLUX.1's own")

    def _check_flux2_folder(self) -> None:
        for part in FLUX2_PARTS:
            if not self._check_part(self.place, part):
                return
        config = _json(self.place / "transformer" / "config.json")
        if config.get("_class_name") not in (None, "Flux2Transformer2DModel"):
            self.add(
                f"transformer/ holds a {config['_class_name']}, not a Flux2Transformer2DModel; give FLUX.2's folder"
            )
            return
        text = _json(self.place / "text_encoder" / "config.json")
        width, wanted = text.get("hidden_size", text.get("text_config", {}).get("hidden_size")), config.get(TEXT_WIDTH)
        if width and wanted and FLUX2_LAYERS * width != wanted:
            found = f"text_encoder gives {FLUX2_LAYERS} x {width} features and the transformer takes {wanted}"
            self.add(f"{found}; give the folder of one model")

    def _check_transformer(self, config: Mapping[str, Any]) -> bool:
        """Whether the transformer is another one than FLUX.1's for text to image."""
        cls, channels = config.get("_class_name"), config.get("in_channels")
        if cls is not None and cls != "FluxTransformer2DModel":
            self.add(f"transformer/ holds a {cls}, not FLUX.1's FluxTransformer2DModel; give a FLUX.1 folder")
        elif channels in IN_CHANNELS:
            self.add(f"is {IN_CHANNELS[channels]}, which needs a second image as input; give FLUX.1-dev's folder")
        return not self.findings.sound(self.key)

    def _check_part(self, base: Path, part: str) -> bool:
        """Whether a part of a folder in diffusers layout is there and whole."""
        folder = base / part
        if not folder.is_dir():
            self.add(f"{base} has no {part}/; give a complete folder in diffusers layout, or a hub name")
        elif problem := next(_problems(folder, part, self.alone), None):
            self.add(problem)
        return self.findings.sound(self.key)

    # -- a file, or a name on the hub ----------------------------------------------------------------------------------

    def _check_file(self) -> None:
        if not self.alone and self.arch not in FLUX_ARCHS:
            return  # ai-toolkit reads checkpoints of other models in one file
        if self.alone and self.arch not in FLUX_ARCHS:
            self.add("is a file, and FLUX.2 is loaded from a folder; give one in diffusers layout, or a hub name")
            return
        if self.place.suffix.lower() == ".gguf":
            self.add("is a GGUF file, made for inference only; give the model's .safetensors in bf16 or FP8")
        elif self.place.suffix.lower() not in SUFFIXES:
            self.add("is not a .safetensors file; give one, or a folder in diffusers layout")
        else:
            self._check_checkpoint()

    def _check_checkpoint(self) -> None:
        try:
            header = read_header(self.place)
            kind, config = kind_of(header), flux_config(header)
        except CheckpointError as error:
            self.add(str(error))
            return
        if not self.alone:
            rule = f"is {kind} in one file, and ai-toolkit loads FLUX from a folder in diffusers layout"
            self.add(f"{rule}; write black-forest-labs/FLUX.1-dev or its folder, or train with coat-flux train")
        elif config["in_channels"] in IN_CHANNELS:
            self.add(f"is {IN_CHANNELS[config['in_channels']]}, which needs a second image as input; give FLUX.1-dev's")
        else:
            base = base_model(self.name, self.extras)
            key = self.key.replace("name_or_path", "extras_name_or_path")
            if Path(base).is_dir():
                for part in PARTS[1:]:
                    if not self._check_part(Path(base), part):
                        return
            else:
                self._check_hub(base, key)

    def _check_missing(self, name: str, key: str) -> None:
        """Neither here nor a name of the hub: a path that is wrong, or a name without its owner."""
        near = closest(Path(name).name, KNOWN, cutoff=0.8)
        remedy = f"did you mean {BFL}/{near}?" if near and "/" not in name else "correct the path, or write owner/name"
        self.findings.add(key, f"no such folder or file in {Path.cwd()}; {remedy}", name)

    def _check_hub(self, name: str, key: str) -> None:
        """A repository of the hub: what is known of it without asking, and whether it can be downloaded."""
        if not _HUB_NAME.fullmatch(name):
            self._check_missing(name, key)
            return
        owner, _, repository = name.partition("/")
        known = GATED.get(repository) if owner == "black-forest-labs" else None
        wanted, fits = self.arch, STANDALONE_ARCHS if self.alone else (*ARCHS.values(), *STANDALONE_ARCHS)
        if known not in (None, wanted) and key == self.key and (self.alone or wanted in fits):
            arch = f"model.arch: {known}" if known in fits else None
            fit = f"which does not fit arch {wanted}" if arch or not self.alone else "which is not trained here"
            rule = f"is {known.replace('_', ' ')}, {fit}"
            self.findings.add(key, f"{rule}; write {arch or 'black-forest-labs/FLUX.1-dev'}", name)
        elif _cached(name):
            return
        elif os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            rule = "is neither here nor in the hub's cache, and HF_HUB_OFFLINE forbids a download"
            self.findings.add(key, f"{rule}; unset it, or give a folder", name)
        elif known is not None and not _has_token(self.root):
            page = f"https://huggingface.co/{name}"
            rule = f"asks for an agreement before the download, and there is no token here; accept it on {page}"
            mirror = "huggingface.co" not in os.environ.get("HF_ENDPOINT", "huggingface.co")
            (self.findings.warn if mirror else self.findings.add)(key, f"{rule}, then run `hf auth login`", name)
        elif re.search("stable-diffusion|sdxl", name, re.IGNORECASE) and (self.alone or self.arch in FLUX_ARCHS):
            self.findings.add(key, f"is Stable Diffusion by its name; write {DEV}, or its folder", name)
        elif known is None:
            near = closest(repository, KNOWN) if owner == BFL and repository not in KNOWN else None
            rule = f"no repository known here; did you mean {BFL}/{near}?"
            if near:
                self.findings.warn(key, rule, name)
                return
            self.findings.warn(key, "no such folder here, so it is downloaded from the hub under this name", name)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _problems(folder: Path, part: str, alone: bool) -> Iterator[str]:
    """Why a part cannot be loaded, as `<rule>; <remedy>`."""
    again = "download the model again"
    if part.startswith("tokenizer"):
        names = ("tokenizer.json", "vocab.json", "spiece.model")
        if not any((folder / name).is_file() for name in names):
            yield f"{folder} has none of {', '.join(names)}; {again}"
        return
    config = folder / ("scheduler_config.json" if part == "scheduler" else "config.json")
    if not _json(config):
        yield f"{config} is missing or not JSON; {again}"
    if part == "scheduler":
        return
    for index in folder.glob("*.safetensors.index.json"):
        shards = _json(index).get("weight_map")
        absent = sorted({name for name in shards.values() if not (folder / name).is_file()}) if shards else []
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            yield f"{folder} has no {absent[0]}{more}, which {index.name} lists; {again}"
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern)]
        if pickles and not alone:
            return
        if pickles:
            yield f"{folder} has its weights only as a pickle ({pickles[0]}), which can run code; give .safetensors"
        else:
            yield f"{folder} has no .safetensors file; {again}"
    for file in weights:
        try:
            read_header(file)
        except CheckpointError as error:
            yield f"{file} {error}"


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "model_index.json"), str)
    except HFValidationError:
        return False


def _has_token(toolkit_root: Path | None) -> bool:
    """Whether the hub's token is in the environment, stored by `hf auth login`, or in ai-toolkit's `.env`."""
    from huggingface_hub import get_token

    env = toolkit_root / ".env" if toolkit_root is not None else None
    lines = env.read_text(encoding="utf-8", errors="replace").splitlines() if env and env.is_file() else []
    return bool(get_token()) or any(re.match(r"\s*(HF_TOKEN|HUGGING_FACE_HUB_TOKEN)\s*=\s*\S", line) for line in lines)
