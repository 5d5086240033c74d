"""Checks of a job's model and this machine's GPU before anything is loaded or downloaded."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base.names import COAT_TYPE
from ...config.check import check_needs, missing_packages
from ...config.findings import ConfigError, Finding, Findings, closest
from ...config.job import JobConfig
from ...config.job_sections import PROCESS_TYPES
from ...config.rules import STANDALONE, STANDALONE_ARCHS, arch_of
from ...mini_flux import EMBEDDED_MODEL, MINI_FLUX
from . import ARCHS, FAMILIES, FLUX, FLUX2, PIPELINES, REFUSED
from .checkpoint import DEV, IN_CHANNELS, SUFFIXES, CheckpointError, base_model, cached_folder, flux_config
from .encodings import read_header
from .family import Family

BFL = "black-forest-labs"
REPOSITORIES = {name: arch for family in FAMILIES.values() for name, arch in family.repositories.items()}
PIPELINE_ARCHS = {arch for archs in PIPELINES.values() for arch in archs}
UNGATED = {name for family in FAMILIES.values() for name in family.ungated}
FLUX_ARCHS = FLUX.archs  # that ai-toolkit loads from a folder in diffusers layout
CHECKPOINTS = {arch: file for family in FAMILIES.values() for arch, file in family.files.items()}
T5_WIDTH = 4096
FLEX2_CHANNELS = 196
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
PLACES = ("extensions", "extensions_built_in", "toolkit/models")  # where ai-toolkit looks for classes with an `arch`
_ARCH = re.compile(r"^[ \t]+arch\b[^=\n]*=\s*([\"'][^\"'\n]+[\"'])", re.MULTILINE)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_TOKEN = re.compile(r"^\s*(HF_TOKEN|HUGGING_FACE_HUB_TOKEN)\s*=\s*\S", re.MULTILINE)


def check_models(
    raw: Any, *, file: str = "", trainer: str = STANDALONE, toolkit_root: Path | None = None, elsewhere: bool = False
) -> list[Finding]:
    """Findings about the models of a job without config errors.

    Args:
        raw: the whole job.
        trainer: `standalone` or `ai-toolkit`.
        toolkit_root: ai-toolkit's folder, for its archs and the hub token in its `.env`.
        elsewhere: the job runs on another machine: this one's GPU and files do not matter.
    """
    findings = Findings(file)
    for i, process in enumerate(raw["config"]["process"]):
        if process.get("type") not in PROCESS_TYPES:
            continue
        path, coat = f"config.process[{i}]", process.get("coat") or {}
        if trainer != STANDALONE and process["type"] == COAT_TYPE and coat.get("enabled", True):
            host = set() if toolkit_root is None else set(archs_of(toolkit_root))
            check_arch(arch_of(process["model"]), host, f"{path}.model.arch", findings)
        if not elsewhere and findings.sound(f"{path}.model.arch"):
            check_device(process.get("device"), f"{path}.device", findings)
            check_model(process["model"], f"{path}.model", findings, trainer, toolkit_root)
        if trainer != STANDALONE:
            if not elsewhere:
                check_needs(process, path, findings)
            encoder = _json(_place_of(process["model"]) / "text_encoder_2" / "config.json")
            width = encoder.get("d_model", T5_WIDTH)
            if process.get("decorator") and width != T5_WIDTH:
                text = f"has {T5_WIDTH} features and this model's text {width}; remove it"
                findings.add(f"{path}.decorator", text)
    return findings.all


def require_here(job: JobConfig) -> None:
    """Raise ConfigError if a package, the GPU or the model is missing for the stand-alone trainer."""
    findings = missing_packages(job) or check_models(job.raw, file=job.file)
    errors = [item for item in findings if item.severity == "error"]
    if errors:
        raise ConfigError(errors)


def check_arch(arch: str, host: Collection[str], path: str, findings: Findings) -> None:
    """Refuse an arch (without a tag) that COAT does not train; warn of one missing from `host`, if not empty."""
    if arch in ARCHS:
        return
    if arch in REFUSED:
        remedy = "write coat: {enabled: false}, or train another model of docs/models.md"
        findings.add(path, f"{REFUSED[arch]}; {remedy}", arch)
    elif arch in host or not host:
        text = "not known here: its blocks are treated cautiously; look at the table after the first step"
        findings.warn(path, text, arch)
    else:
        near = closest(arch, {*host, *ARCHS})
        remedy = f"did you mean '{near}'?" if near else "write flux, or another arch of docs/models.md"
        findings.add(path, f"ai-toolkit has no such arch, and may load Stable Diffusion 1; {remedy}", arch)


def archs_of(root: Path) -> Iterator[str]:
    """Yield the `arch` of every model class in an ai-toolkit checkout, as its source has them; nothing is imported."""
    folders = [each for place in PLACES if (root / place).is_dir() for each in sorted((root / place).iterdir())]
    for folder in folders:  # a user's extension may be a link
        for file in [folder] if folder.suffix == ".py" else sorted(folder.rglob("*.py")):
            for text in _ARCH.findall(file.read_text(encoding="utf-8", errors="replace")):
                yield ast.literal_eval(text)


def check_device(device: Any, path: str, findings: Findings) -> None:
    """Refuse a GPU that torch does not find: FLUX would train on the CPU, for weeks."""
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in ("cuda", "mps"):
        return
    import torch

    from ...base.environment import driver_problem

    backend = torch.backends.mps if kind == "mps" else torch.cuda
    if not backend.is_available():
        rule = f"torch finds no {kind} device here"
        remedy = "run it on a machine with one"
        if kind == "cuda" and not (torch.version.cuda or torch.version.hip):
            rule = "the installed torch is built without CUDA"
            remedy = "install one with CUDA (pytorch.org)"
        elif kind == "cuda" and "driver on your system is too old" in driver_problem()[0]:
            rule, remedy = driver_problem()
        findings.add(path, f"{rule}, so the run would be on the CPU; {remedy}, or write device: cpu", device)
    elif kind == "cuda" and index.isdecimal() and int(index) >= torch.cuda.device_count():
        findings.add(path, f"torch finds {torch.cuda.device_count()} GPUs here, counted from 0; write cuda:0", device)


class _Refusal(Exception):
    """Why a model cannot be trained, as `<rule>; <remedy>`: the first one ends the check."""

    def __init__(self, text: str, *, key: str = "name_or_path", value: Any = None, warns: bool = False) -> None:
        super().__init__(text)
        self.key, self.value, self.warns = key, value, warns


def check_model(
    model: Mapping[str, Any], path: str, findings: Findings, trainer: str, toolkit_root: Path | None = None
) -> None:
    """Add what would stop a trainer while it loads the block `model`, or let it train another one than is meant."""
    try:
        _Model(model, trainer == STANDALONE, toolkit_root).check()
    except _Refusal as refusal:
        add = findings.warn if refusal.warns else findings.add
        add(f"{path}.{refusal.key}", str(refusal), refusal.value or str(model["name_or_path"]))


class _Model:
    def __init__(self, model: Mapping[str, Any], alone: bool, root: Path | None):
        self.name = str(model["name_or_path"])
        self.place = _place_of(model)
        self.arch = arch_of(model)
        self.alone = alone
        self.root = root
        self.own_vae = model.get("vae_path") is not None
        self.extras = model.get("extras_name_or_path")

    def check(self) -> None:
        if re.match(r"https?:", self.name):
            if self.alone or "civitai.com" not in self.name:
                raise _Refusal("is a web address; write owner/name, or a downloaded file or folder")
        elif self.place.is_dir():
            self._check_folder()
        elif self.place.exists():
            self._check_file()
        else:
            self._check_hub(self.name)

    def _check_folder(self) -> None:
        if not self.alone and self.arch in CHECKPOINTS:
            needed = CHECKPOINTS[self.arch]
            if not any(path.is_file() for path in self.place.glob(needed)):
                raise _Refusal(f"has no {needed}, which ai-toolkit loads for {self.arch}; give the folder of that file")
            return
        pipeline = _json(self.place / "model_index.json").get("_class_name")
        if isinstance(pipeline, list):  # module and name
            pipeline = pipeline[-1]
        archs = PIPELINES.get(pipeline, ())
        if pipeline is None and not any((self.place / part).is_dir() for part in ("transformer", "unet")):
            self._refuse_folder()
        if pipeline is not None and self.alone and not set(archs) & set(STANDALONE_ARCHS):
            where = f", or train it inside ai-toolkit with model.arch: {archs[0]}" if archs else ""
            rule = f"is a {pipeline}, and the stand-alone trainer trains FLUX.1 and FLUX.2"
            raise _Refusal(f"{rule}; give a folder of one of them{where}")
        is_checked = self.alone or self.arch in PIPELINE_ARCHS
        if archs and not is_checked:  # its family's fit
            is_checked = ARCHS.get(self.arch) not in (None, ARCHS.get(archs[0]))
        if archs and self.arch not in archs and is_checked:
            rule = f"is a {pipeline}, which does not fit arch {self.arch}"
            raise _Refusal(f"{rule}; write model.arch: {' or '.join(archs)}, or another folder")
        if self.arch in FLUX_ARCHS:
            self._check_parts(FLUX)
        elif self.alone:
            self._check_parts(FLUX2)

    def _refuse_folder(self) -> None:
        part = _json(self.place / "config.json").get("_class_name")
        if part is not None:
            raise _Refusal(f"is only the {part} of a model; give the folder around it, {self.place.resolve().parent}")
        for snapshot in self.place.glob("snapshots/*/model_index.json"):
            raise _Refusal(f"is the hub's cache of a model; give {snapshot.parent}, or the model's name on the hub")
        remedy = "give that of a downloaded model"
        files = sorted(path for path in self.place.iterdir() if path.suffix.lower() in SUFFIXES)
        if files and (self.alone or self.arch not in FLUX_ARCHS):
            remedy = f"give one that is, or one file, such as {files[0]}"
        raise _Refusal(f"is not a folder in diffusers layout, it has no model_index.json; {remedy}")

    def _check_parts(self, family: Family) -> None:
        config = _json(self.place / "transformer" / "config.json")
        base = self.place
        _check_part(self.place, "transformer", self.alone)
        _check_transformer(config, family)
        if (self.arch == "flex2") != (config.get("in_channels") == FLEX2_CHANNELS):
            rule = f"has {config.get('in_channels')} channels, and Flex.2 has {FLEX2_CHANNELS}"
            raise _Refusal(f"{rule}; give a folder of arch {self.arch}")
        own_encoder = not self.alone and (self.arch != "flux_kontext" or (base / "text_encoder").exists())
        if self.extras is not None and not own_encoder:
            base = Path(self.extras)
        self._check_others(base, family)
        for part, (key, takes, layers) in family.text_features.items():
            encoder = _json(base / part / "config.json")
            width = encoder.get(key, encoder.get("text_config", {}).get(key))
            wanted = config.get(takes)
            if width and wanted and layers * width != wanted:
                features = f"{layers} x {width}" if layers > 1 else width
                raise _Refusal(f"{part} gives {features} features and the transformer takes {wanted}; give one model's")

    def _check_others(self, base: Path, family: Family) -> None:
        if not base.is_dir():
            self._check_hub(str(base), "extras_name_or_path")
            return
        for part in family.folders:
            if part != "transformer" and not (part == "vae" and self.own_vae):
                _check_part(base, part, self.alone)

    def _check_file(self) -> None:
        suffix = self.place.suffix.lower()
        if self.arch not in FLUX_ARCHS:
            if not self.alone:
                return  # ai-toolkit reads checkpoints of other models in one file
            raise _Refusal("is a file, and FLUX.2 is loaded from a folder; give one in diffusers layout, or a hub name")
        if suffix not in SUFFIXES:
            raise _Refusal("is not a .safetensors or .gguf file; give one, or a folder in diffusers layout")
        try:
            header = read_header(self.place)
            config = flux_config(header.shapes)
            header.encodings()
        except CheckpointError as error:
            raise _Refusal(str(error)) from error
        if not self.alone:
            rule = "is FLUX.1 in one file, and ai-toolkit loads FLUX from a folder in diffusers layout"
            raise _Refusal(f"{rule}; write {DEV} or its folder, or train with coat-flux train")
        _check_transformer(config, FLUX)
        self._check_others(Path(base_model(self.name, self.extras)), FLUX)

    def _check_hub(self, name: str, key: str = "name_or_path") -> None:
        refuse = functools.partial(_Refusal, key=key, value=name)
        owner, _, repository = name.partition("/")
        if not _HUB_NAME.fullmatch(name) or Path(owner).is_dir():
            near = None if repository else closest(name, REPOSITORIES, cutoff=0.8)
            remedy = f"did you mean {BFL}/{near}?" if near else "correct the path, or write owner/name"
            raise refuse(f"no such folder or file in {Path.cwd()}; {remedy}")
        known = REPOSITORIES.get(repository) if owner == BFL else None
        fits = STANDALONE_ARCHS if self.alone else PIPELINE_ARCHS
        if known not in (None, self.arch) and key == "name_or_path" and (self.alone or self.arch in fits):
            if known in fits:
                rule = f"is {known.replace('_', ' ')}, which does not fit arch {self.arch}"
                raise refuse(f"{rule}; write model.arch: {known}")
            raise refuse(f"is {known}, which is not trained here; write {DEV}")
        if cached_folder(name) is not None:
            return
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            rule = "is neither here nor in the hub's cache, and HF_HUB_OFFLINE forbids a download"
            raise refuse(f"{rule}; unset it, or give a folder")
        if known is not None and repository not in UNGATED:
            if _has_token(self.root):
                return
            rule = "must be agreed to before the download, and no access token was found"
            remedy = f"accept it on https://huggingface.co/{name}, then run `hf auth login`"
            mirror = "huggingface.co" not in os.environ.get("HF_ENDPOINT", "huggingface.co")
            raise refuse(f"{rule}; {remedy}", warns=mirror)
        if re.search("stable-diffusion|sdxl", name, re.IGNORECASE) and (self.alone or self.arch in FLUX_ARCHS):
            raise refuse(f"is Stable Diffusion by its name; write {DEV}, or its folder")
        if owner == BFL and known is None:
            near = closest(repository, REPOSITORIES)
            if near:
                raise refuse(f"no repository known here; did you mean {BFL}/{near}?", warns=True)
        raise refuse("no such folder here, so it is downloaded from the hub under this name", warns=True)


def _place_of(model: Mapping[str, Any]) -> Path:
    """Its folder or file; the embedded one may be still to be copied."""
    place = Path(model["name_or_path"])
    is_to_come = place.name == Path(EMBEDDED_MODEL).name and not place.exists()
    return MINI_FLUX if is_to_come else place


def _check_transformer(config: Mapping[str, Any], family: Family) -> None:
    name = config.get("_class_name", family.transformer)
    channels = config.get("in_channels")
    if name != family.transformer:
        raise _Refusal(f"transformer/ holds a {name}, not a {family.transformer}; give the folder of a model with one")
    if family is FLUX and channels in IN_CHANNELS:
        raise _Refusal(f"is {IN_CHANNELS[channels]}, which needs a second image as input; give FLUX.1-dev's")


def _check_part(base: Path, part: str, alone: bool) -> None:
    folder, again = base / part, "download the model again"
    if not folder.is_dir():
        raise _Refusal(f"{base} has no {part}/; give a complete folder in diffusers layout, or a hub name")
    if part.startswith("tokenizer"):
        names = ("tokenizer.json", "vocab.json", "spiece.model")
        if not any((folder / name).is_file() for name in names):
            raise _Refusal(f"{folder} has none of {', '.join(names)}; {again}")
        return
    config = folder / ("scheduler_config.json" if part == "scheduler" else "config.json")
    if not _json(config):
        raise _Refusal(f"{config} is missing or not JSON; {again}")
    if part == "scheduler":
        return
    for index in folder.glob("*.safetensors.index.json"):
        shards = _json(index).get("weight_map", {})
        absent = sorted({name for name in shards.values() if not (folder / name).is_file()})
        if absent:
            raise _Refusal(f"{folder} has no {absent[0]}, which {index.name} lists ({len(absent)} missing); {again}")
    weights = sorted(folder.glob("*.safetensors"))
    pickle = next((path.name for path in folder.iterdir() if path.suffix in PICKLES), None)
    if not weights and pickle is None:
        raise _Refusal(f"{folder} has no .safetensors file; {again}")
    if not weights and alone:
        raise _Refusal(f"{folder} has its weights only as a pickle ({pickle}), which can run code; give .safetensors")
    for file in weights:
        try:
            read_header(file)
        except CheckpointError as error:
            raise _Refusal(f"{file} {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _has_token(toolkit_root: Path | None) -> bool:
    from huggingface_hub import get_token

    if get_token():
        return True
    env = Path() if toolkit_root is None else toolkit_root / ".env"
    return env.is_file() and _TOKEN.search(env.read_text(encoding="utf-8", errors="replace")) is not None
