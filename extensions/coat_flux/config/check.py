"""All findings about one job, for either trainer."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.names import COAT_TYPE
from .ai_toolkit_keys import Toolkit, check_keys
from .coat import COATConfig, check_combinations
from .findings import ConfigError, Finding, Findings, closest
from .job import JobConfig
from .job_file import plain_job
from .job_sections import PROCESS_TYPES, ValidationSection
from .options import build
from .rules import AI_TOOLKIT, STANDALONE, Block, Entry, arch_of, check_entry

TRAINERS = (STANDALONE, AI_TOOLKIT)
FILE, FILE_OR_HUB = "a file that exists", "one that exists, or owner/name on the hub"
_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){1,2}")  # a third part names a file
_SET, _OFF, _EXTRACTOR = r"(?!none$).+", "none|false", r"(?!(none|v[3-9]|v10)$).+"
_A_LORA = {"network": _SET, "network.type": "none|lora|locon|dora", "train.do_cfg": _OFF, "train.do_random_cfg": _OFF}
_FLUX = "flux|flux_kontext|flex2"
_OF_DIFFUSERS = "flux|sd1|sd2|sd3|sdxl|ssd|vega|pixart|pixart_sigma|auraflow|lumina2"  # one class loads them
# What a job may name and its trainer fails without, in or after the load: keys and patterns of their values, all of
# which match (`none`: absent), and what the first one needs: a package, a file, or `<rule>; <remedy>`. Where a value
# works with some archs, these are listed.
NEEDS: tuple[tuple[dict[str, str], str], ...] = (
    ({"logging.use_wandb": "true"}, "wandb"),
    ({"train.optimizer": "(adamw?|ademamix|lion)8bit"}, "bitsandbytes"),
    ({"train.optimizer": "prodigy"}, "prodigyopt"),
    ({"train.optimizer": "lion"}, "lion-pytorch"),
    ({"train.optimizer": "dadaptation.*"}, "dadaptation"),
    ({"train.loss_type": "wavelet"}, "pytorch-wavelets"),
    ({"train.xformers": "true"}, "xformers"),
    ({"train.attention_backend": "xformers", "arch": _FLUX}, "xformers"),
    ({"train.attention_backend": "flash|flash_varlen", "arch": _FLUX}, "flash-attn"),
    ({"train.attention_backend": "sage|sage_varlen", "arch": _FLUX}, "sageattention"),
    ({"train.attention_backend": ".*_hub", "arch": _FLUX}, "kernels"),
    ({"train.diffusion_feature_extractor_path": _EXTRACTOR}, FILE),
    ({"train.latent_feature_extractor_path": _EXTRACTOR, "train.diffusion_feature_extractor_path": "none"}, FILE),
    ({"train.adapter_assist_name_or_path": _SET}, FILE_OR_HUB),
    ({"model.vae_path": _SET, "arch": f"{_OF_DIFFUSERS}|flux2.*"}, FILE_OR_HUB),
    ({"model.refiner_name_or_path": _SET, "arch": _OF_DIFFUSERS}, FILE_OR_HUB),
    ({"model.lora_path": _SET, "arch": _OF_DIFFUSERS}, FILE_OR_HUB),
    ({"model.assistant_lora_path": _SET, "arch": "flux|zimage|krea2"}, FILE_OR_HUB),
    ({"model.inference_lora_path": _SET, "arch": "flux"}, FILE_OR_HUB),
    ({"model.split_model_over_gpus": "true", "model.is_flux": _OFF}, "goes with model.is_flux: true; write that"),
    ({"model.split_model_over_gpus": "true", "device": "cpu|mps"}, "is for CUDA GPUs; write false"),
    ({"model.attn_masking": "true", "model.is_flux": _OFF}, "goes with model.is_flux: true; write that"),
    ({"train.standardize_latents": "true", "arch": _FLUX}, "ai-toolkit's figures are of Stable Diffusion; write false"),
    (
        {"train.single_item_batching": "true", **_A_LORA},
        "ai-toolkit gives a LoRA twice as many strengths as images; write false",
    ),
    ({"network.type": "lorm"}, "ai-toolkit's module returns nothing; write lora"),
)


def check_job_dict(
    raw: Any,
    *,
    file: str = "",
    trainer: str = STANDALONE,
    toolkit_root: Path | None = None,
    num_processes: int = 1,
) -> list[Finding]:
    """Check a parsed job for one of `TRAINERS` and return errors, then warnings; raises ValueError for another trainer.

    The source of the ai-toolkit in `toolkit_root` may know newer keys than our table.
    """
    if trainer == STANDALONE:
        job, findings = JobConfig.examine(raw, file=file)
        missing = missing_packages(job) if job is not None and not findings.errors else []
        return [*missing, *findings.all]
    if trainer != AI_TOOLKIT:
        raise ValueError(f"trainer={trainer!r}: must be one of {', '.join(TRAINERS)}; write {AI_TOOLKIT}")
    findings, toolkit = Findings(file), Toolkit(toolkit_root)
    if toolkit.problem:
        findings.warn("ai-toolkit", toolkit.problem)
    plain = plain_job(raw, findings)
    if plain is not None:
        name = plain["config"]["name"]
        for i, process in enumerate(plain["config"]["process"]):
            _check_process(process, f"config.process[{i}]", name, toolkit, findings, num_processes)
    return findings.all


def check_needs(
    process: Mapping[str, Any], path: str, findings: Findings, *, elsewhere: bool = False, alone: bool = False
) -> None:
    """Check the rows of `NEEDS`.

    `elsewhere`: it runs on another machine, whose packages and files are unknown; `alone`: without ai-toolkit.
    """
    block = Block(process, path, findings)
    for values, need in NEEDS:
        key, words = next(iter(values)), {"arch": arch_of(process.get("model") or {})}
        words |= {name: str(block.get(name)).lower() for name in values if name != "arch"}
        if not all(re.fullmatch(pattern, words[name], re.DOTALL) for name, pattern in values.items()):
            continue
        if ";" in need:
            block.error(key, need)
        elif elsewhere:
            continue
        elif need in (FILE, FILE_OR_HUB):
            place = block.get(key)
            on_hub = need == FILE_OR_HUB and _HUB.fullmatch(place) and not Path(place.partition("/")[0]).is_dir()
            if not on_hub and not Path(place).exists():
                block.error(key, f"no such file or folder in {Path.cwd()}; give {need}")
        elif not is_installed(need):
            rule = f"needs the package {need}; pip install {need}"
            if alone or is_installed("lycoris"):  # which ai-toolkit needs for every job: this is its Python
                block.error(key, f"{rule}, or write another value")
            else:
                block.warn(key, f"{rule} in ai-toolkit's Python, if it is not there; this Python lacks it")


def is_installed(package: str) -> bool:
    """Whether a package can be imported; its name is as pip knows it."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    # a folder that only has its name, as wandb makes one for its files, has no origin
    return spec is not None and spec.origin is not None


def missing_packages(job: JobConfig) -> list[Finding]:
    """Optional packages that the job needs and that are not installed."""
    findings = Findings(job.file)
    check_needs(job.raw["config"]["process"][0], "config.process[0]", findings, alone=True)
    return findings.errors


def require_packages(job: JobConfig) -> None:
    """Raise ConfigError if an optional package that the job needs is not installed."""
    if missing := missing_packages(job):
        raise ConfigError(missing)


def _check_process(process: Any, path: str, name: str, toolkit: Toolkit, findings: Findings, processes: int) -> None:
    """Check an entry of `config.process` for ai-toolkit."""
    kind = process.get("type")
    if kind is None:
        findings.add(f"{path}.type", f"is missing; write {COAT_TYPE}")
    elif kind not in PROCESS_TYPES:
        near = closest(kind, PROCESS_TYPES, cutoff=0.8)
        if near or not isinstance(kind, str):
            findings.add(f"{path}.type", f"not a process type; did you mean '{near or COAT_TYPE}'?", kind)
        else:
            findings.warn(f"{path}.type", "a process type of another extension, not checked here", kind)
        return
    check_keys(process, path, toolkit, findings)
    coat = None
    if kind in (None, COAT_TYPE):
        coat = build(COATConfig, process.get("coat"), f"{path}.coat", findings)
        check_combinations(coat, f"{path}.coat", findings)
    elif "coat" in process:
        findings.add(f"{path}.coat", f"is not read with type: {kind}; write type: {COAT_TYPE}")
    entry = Entry(AI_TOOLKIT, process, path, findings, name, coat)
    if "validation" in process:
        build(ValidationSection, process["validation"], f"{path}.validation", findings)
        if not entry.enabled:
            entry.error("validation", f"needs type: {COAT_TYPE} and coat.enabled: true; write those, or remove it")
        for i, dataset in enumerate(entry.blocks("datasets")):
            if any(key.startswith("control_path") and dataset.raw[key] for key in dataset.raw):
                entry.error("validation", f"cannot use the control images of datasets[{i}]; remove the block")
    check_entry(entry)
    if processes == 1:
        return
    # our loop inside ai-toolkit sums the gradients of a network, and of nothing else
    others = any(process.get(key) for key in ("embedding", "adapter", "decorator"))
    if not entry.enabled:
        text = f"ai-toolkit does not sum their gradients; write type: {COAT_TYPE}, coat.enabled: true, or start one"
        findings.add("num_processes", text, processes)
    elif others or not process.get("network") or entry.get("train.merge_network_on_save"):
        text = "several processes train a network (a LoRA) and nothing else; start one"
        findings.add("num_processes", text, processes)
