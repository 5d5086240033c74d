"""A comparison in progress: runs of several arms and seeds on the same photos, in one folder.

    <training_folder>/<name>_verify/
        bf16_seed42/, coat_seed42/ …   ordinary run folders
        photos/                        with `validation` alone: links to the photos of both folders

An *arm* overrides options of the config's `coat:` block: `{}` is the config itself, `BF16` the run without COAT. Runs
of one seed have the same random draws, and all runs measure the loss on the same held-out photos with the same noise:
only training differs. When restarted, finished runs are reused and others resume.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml
from safetensors.torch import load_file
from tqdm import tqdm

from ..base.errors import UserError
from ..base.files import link_or_copy, remove
from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from ..base.run_log import bar_options
from ..blocks.held import USABLE_FRACTION
from ..config.coat import ADAMW, OptimizerOptions
from ..config.findings import ConfigError
from ..config.job import JobConfig
from ..data.captions import caption_file
from ..data.files import find_images
from ..data.hold_out import choose_hold_out
from ..data.loader import LatentDataset
from ..data.preflight import DataReport
from ..mini_flux import provide_embedded
from ..pages.run import RunFolder
from ..plan.job import JobFacts
from ..plan.predict import predict
from ..saves.state import differences, restore_tensors
from ..trainers.standalone.loading import TORCH_DTYPES, load_encoders, load_transformer
from ..trainers.standalone.network import add_lora
from ..trainers.standalone.trainer import COATTrainer
from ..trainers.standalone.validation import fixed_noise, held_out_of, loss_of
from ..trainers.standalone.workers import Workers
from ..watch.phases import MEMORY_FILE

Arm: TypeAlias = Mapping[str, Any]

BF16: Arm = {"enabled": False}
NOTHING_IN_FP8: Arm = {
    "weight": {"use_fp8": False},
    "activation": {"use_fp8": False},
    "optimizer": {"use_fp8": False},
    "memory": {"enable_efficient_checkpoint": False},
}
EIGHT_BIT = (COAT_OPTIMIZER, "adamw8bit")
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 16
OTHER_FOLDER = "held_out"  # of photos that `validation` takes from elsewhere
POINTS_OF_CURVE = 20


class VerifyError(UserError, RuntimeError):
    """Runs cannot be compared as requested, or a folder belongs to another comparison."""


@dataclass(frozen=True)
class ArmResult:
    """The result of one run, in its own precision."""

    name: str
    arm: str
    seed: int
    lora: Path
    curve: tuple[tuple[int, float], ...]  # (step, held-out loss)
    final_own: float  # its end
    seconds: float  # of all steps, without validation
    steps_per_s: float
    peak_bytes: int | None  # of a step; None if not measured
    samples: tuple[Path, ...]


@dataclass(frozen=True)
class Study:
    """An open comparison, made by `open_study`; no run is trained on the `held_out` photos."""

    job: JobConfig
    folder: Path
    steps: int
    every: int
    held_out: list[str]
    device: torch.device

    def prepare(self, arm_name: str, arm: Arm, seed: int) -> dict[str, Any]:
        """The job of one run; ConfigError if the arm's options contradict it.

        Without COAT the optimizer is AdamW with the same options, and the model is not quantized.
        """
        name = f"{arm_name}_seed{seed}"
        raw = copy.deepcopy(self.job.raw)
        raw["config"]["name"] = name
        process = raw["config"]["process"][0]
        one_of_several(process, self.folder, seed, self.steps, {"hold_out": self.held_out, "every": self.every})
        params = dict(self.job.train.optimizer_params or {})
        moments = {field.name: params[field.name] for field in fields(OptimizerOptions) if field.name in params}
        coat = _laid_over(_laid_over(process.get("coat") or {}, {"optimizer": moments}), arm)
        train = process["train"]
        train["steps"] = self.steps
        train["optimizer_params"] = {key: params[key] for key in ADAMW if key in params}
        process.update(type=COAT_TYPE, coat=coat)
        enabled = coat.get("enabled", True)
        if not enabled and self.job.train.optimizer in EIGHT_BIT:
            train["optimizer"] = "adamw"
            train.pop("fused_backward", None)
        codes = enabled and coat.get("weight", {}).get("use_fp8", True)
        if process["model"].get("qtype") == COAT_QTYPE and not codes:
            process["model"]["quantize"] = False
        return JobConfig.from_dict(raw, file=f"{self.job.file} ({name})").raw

    def train_arm(self, arm_name: str, arm: Arm, seed: int) -> ArmResult:
        """Run or resume one run, or reuse it if finished; VerifyError if it has other settings."""
        raw = self.prepare(arm_name, arm, seed)
        folder = self.folder / raw["config"]["name"]
        require_same_job(folder, raw)
        precision = torch.get_float32_matmul_precision()
        try:
            lora = COATTrainer(raw).train()
        finally:
            torch.set_float32_matmul_precision(precision)
            gc.collect()
            torch.cuda.empty_cache()
        run = RunFolder(folder)
        if not run.validation or run.validation[-1][0] != self.steps:
            raise VerifyError(f"{folder}: has no held-out loss of its last step; move it elsewhere")
        seconds = sum(value for _, value in run.metrics.get("s_per_it", []))
        phases = (run.json(MEMORY_FILE) or {}).get("phases", {})
        return ArmResult(
            name=folder.name,
            arm=arm_name,
            seed=seed,
            lora=lora,
            curve=tuple((int(step), loss) for step, loss in run.validation),
            final_own=run.validation[-1][1],
            seconds=seconds,
            steps_per_s=self.steps / seconds if seconds else 0.0,
            peak_bytes=phases["step"]["peak"]["allocated"] if "step" in phases else None,
            samples=tuple(path for (step, _), path in run.samples().items() if step == self.steps),
        )


def bf16_arm(job: JobConfig) -> Arm:
    """The arm that COAT runs are compared with; for whole models the config's optimizer, with fp32 moments.

    AdamW, which rounds to nearest, would lose most updates of bf16 weights (RESULTS.md).
    """
    return NOTHING_IN_FP8 if job.full and job.train.optimizer == COAT_OPTIMIZER else BF16


def _laid_over(block: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    """The block with the arm's options, without FP8 options that no longer apply."""
    merged = dict(block)
    for key, value in arm.items():
        if not isinstance(value, Mapping):
            merged[key] = value
        elif value.get("use_fp8", True) or key == "optimizer":
            merged[key] = {**(merged.get(key) or {}), **value}
        else:
            merged[key] = dict(value)
    return merged


def one_of_several(process: dict[str, Any], folder: Path, seed: int, steps: int, validation: Mapping[str, Any]) -> None:
    """Turn a process entry into a run's in `folder`, with samples at its end and one checkpoint."""
    for key in ("name", "log_dir"):
        process.pop(key, None)
    process.update(training_folder=str(folder), training_seed=seed, validation=dict(validation))
    process.setdefault("train", {})["skip_first_sample"] = True
    process["save"] = {**(process.get("save") or {}), "max_step_saves_to_keep": 1}
    process["sample"] = {**(process.get("sample") or {}), "sample_every": steps}


def require_same_job(run: Path, job: Mapping[str, Any]) -> None:
    """VerifyError if a run's folder has another saved config."""
    path = run / "config.yaml"
    if path.exists():
        saved = yaml.safe_load(path.read_text(encoding="utf-8")).get("config")
        for difference in differences("config", saved, job["config"], strict=True):
            raise VerifyError(
                f"{path}: is of a run with other settings ({difference}); choose another --name or --out; {run} stays"
            )


def open_study(
    config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig,
    *,
    steps: int | None = None,  # of each run; None: the config's
    hold_out: int | None = None,  # number of photos; None: the config's `validation`, else a tenth
    validation: Path | None = None,  # a folder with photos and captions in place of held-out ones
    every: int | None = None,  # steps between points of the loss curves; None: a twentieth of the run
    folder: Path | None = None,
) -> Study:
    """Check a config and choose the photos that no run is trained on, before anything is loaded."""
    job = config if isinstance(config, JobConfig) else JobConfig.load(config)
    if not job.coat.enabled:
        raise ConfigError(
            f"{job.file}: config.process[0].coat.enabled=false: verify compares COAT with bf16; give a config with "
            f"type: {COAT_TYPE} and coat.enabled: true"
        )
    workers = Workers(job.device)
    workers.close()
    if workers.size > 1:
        raise VerifyError(f"{workers.size} processes: verify runs in one; start it without accelerate launch")
    provide_embedded(job.model.name_or_path)
    folder = Path(folder) if folder is not None else job.folder.with_name(f"{job.folder.name}_verify")
    steps = steps or job.train.steps
    if validation is None:
        held_out = hold_out_names(job, hold_out)
    else:
        job, held_out = _with_photos_of(Path(validation), job, folder / "photos")
    study = Study(job, folder, steps, every or max(1, steps // POINTS_OF_CURVE), held_out, workers.device)
    if workers.device.type == "cuda":
        total = torch.cuda.get_device_properties(workers.device).total_memory
        require_room(JobConfig.from_dict(study.prepare("bf16", BF16, job.seed), file=job.file), total / 1e9)
    return study


def require_room(bf16: JobConfig, gpu_gb: float) -> None:
    """VerifyError with remedies if the plan finds the bf16 run too large for the GPU."""
    needed = predict(JobFacts(bf16), gpu_gb * 1e9).peak / USABLE_FRACTION / 1e9
    if needed > gpu_gb:
        raise VerifyError(
            f"{bf16.file}: verify's bf16 run needs a GPU of about {needed:.0f} GB; this one has {gpu_gb:.0f} GB\n"
            "write train.gradient_checkpointing: true and train.cache_text_embeddings: true, or use a larger card"
        )


def hold_out_names(job: JobConfig, count: int | None = None) -> list[str]:
    """Photos to hold out: `count`, else the config's, else a tenth; by name, so that no seed changes them."""
    folders = [Path(entry.folder_path) for entry in job.datasets if not entry.is_reg]
    photos = {path.resolve() for folder in folders for path in find_images(folder)}
    tenth = min(max(1, round(len(photos) * HELD_OUT_SHARE)), MOST_HELD_OUT)
    chosen = choose_hold_out(folders, count or job.validation.hold_out or tenth, job.training_seed)
    names = {}
    for folder, paths in zip(folders, chosen, strict=True):
        names |= dict.fromkeys(path.relative_to(folder).as_posix() for path in paths)
    return list(names)


def _with_photos_of(folder: Path, job: JobConfig, place: Path) -> tuple[JobConfig, list[str]]:
    """The job with the photos of another folder linked into its first dataset, and their names to hold out."""
    raw = copy.deepcopy(job.raw)
    entry = raw["config"]["process"][0]["datasets"][0]
    names = [f"{OTHER_FOLDER}/{path.relative_to(folder).as_posix()}" for path in find_images(folder)]
    if not names:
        raise VerifyError(
            f"--validation {folder}: has no images; give a folder with some, and captions as for training"
        )
    sources: dict[Path, Path] = {}
    for source, target in ((Path(entry["folder_path"]), place), (folder, place / OTHER_FOLDER)):
        for photo in find_images(source):
            for path in (photo, caption_file(photo, job.datasets[0].caption_ext)):
                if path.is_file():
                    sources[target / path.relative_to(source)] = path
    for photo in find_images(place):
        if photo not in sources:
            photo.unlink()
    for link, path in sources.items():
        if not (link.exists() and link.samefile(path)):
            link.parent.mkdir(parents=True, exist_ok=True)
            remove(link)
            link_or_copy(path.resolve(), link)
    entry["folder_path"] = str(place)
    return JobConfig.from_dict(raw, file=job.file), names


@torch.no_grad()
def score_loras(job: JobConfig, loras: Mapping[str, Path], device: torch.device) -> tuple[float, dict[str, float]]:
    """Held-out losses of a bf16 job's model: before training, and with each LoRA, or of each whole model."""
    dtype = TORCH_DTYPES[job.train.dtype]
    held_out = {path for paths in held_out_of(job) for path in paths}
    usable = DataReport(job.datasets, job.trigger_word, job.coat.data).usable()
    samples = [sample for sample in usable if sample.image_path in held_out]
    encoders = load_encoders(job.model.name_or_path, dtype, job.model.extras_name_or_path)
    dataset = LatentDataset(samples, job.datasets, encoders.vae, encoders.text, device, options=job.coat.data)
    dataset.fill()
    if dataset.needs_vae or dataset.needs_encoders:
        for model in (encoders.vae, *encoders.text.models):
            model.to(device)
    noise = fixed_noise(dataset, samples, ())
    del encoders, dataset
    transformer = load_transformer(job.model.name_or_path, dtype, device=device)
    if not job.full:
        adapters = add_lora(transformer, replace(job.network, dropout=None), 0)  # changes nothing yet: B is 0
    losses = []
    for path in tqdm([None, *loras.values()], desc="held-out photos", leave=False, **bar_options()):
        if path is not None and job.full:
            transformer = load_transformer(str(path), dtype, device=device)
        elif path is not None:
            saved = {name: x for name, x in load_file(path).items() if not name.endswith(".alpha")}  # a LoKr's
            restore_tensors(adapters, saved, str(path))
        losses.append(loss_of(transformer, noise, job.train.batch_size, dtype=dtype, device=device))
    return losses[0], dict(zip(loras, losses[1:], strict=True))
