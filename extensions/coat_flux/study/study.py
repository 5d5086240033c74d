"""A comparison in progress: runs of several arms and seeds on the same photos, in one folder.

    <training_folder>/<name>_verify/
        study.json                what is compared; another comparison is refused here
        photos/train, held_out    links to the user's photos and captions
        bf16_seed42/, coat_seed42/ …   ordinary run folders

An *arm* overrides options of the config's `coat:` block: `{}` is the config itself, `BF16` the run without COAT,
`{"optimizer": {"m1_format": "e5m2"}}` changes one option. All random draws (LoRA start, noise, timesteps, order,
caption dropout) depend on the seed and the number of the draw, so runs of one seed get the same in all arms. Every run
repeats the same forwards on the held-out photos with the same noise: only training differs. When restarted, finished
runs are reused and others resume from their newest save, which holds their losses so far.
"""

from __future__ import annotations

import copy
import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import yaml

from ..base.errors import UserError
from ..base.files import link_or_copy, remove, write_file
from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from ..blocks.held import USABLE_FRACTION
from ..config.check import require_packages
from ..config.coat import ADAMW_OPTIONS, OptimizerOptions
from ..config.findings import ConfigError
from ..config.job import JobConfig
from ..data.captions import caption_file
from ..data.files import find_images
from ..data.hold_out import FixedNoise
from ..data.loader import LatentDataset
from ..data.preflight import inspect_datasets
from ..mini_flux import provide_embedded
from ..pages.run import MEMORY_FILE, RunFolder
from ..plan.report import make_plan
from ..saves.identity import data_identity, model_identity
from ..trainers.standalone.loading import TORCH_DTYPES, load_encoders
from ..trainers.standalone.saving import find_resume_point
from ..trainers.standalone.trainer import COATTrainer
from ..trainers.standalone.validation import loss_of, one_each
from ..trainers.standalone.workers import Workers

if TYPE_CHECKING:
    from ..trainers.standalone.session import Session

__all__ = [
    "BF16",
    "Arm",
    "ArmResult",
    "Settings",
    "Study",
    "VerifyError",
    "as_many_as_fit",
    "bf16_arm",
    "held_out_count",
    "open_study",
    "require_same_job",
    "run_name",
]

Arm: TypeAlias = Mapping[str, Any]

BF16: Arm = {"enabled": False}
NOTHING_IN_FP8: Arm = {
    "weight": {"use_fp8": False},
    "activation": {"use_fp8": False},
    "optimizer": {"use_fp8": False},
    "memory": {"enable_efficient_checkpoint": False},
}
EIGHT_BIT = (COAT_OPTIMIZER, "adamw8bit")
ADAMW_KEYS = tuple(option.key for option in ADAMW_OPTIONS)
OPTIMIZER_KEYS = tuple(field.name for field in fields(OptimizerOptions))
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 16
EACH_ONCE = {"num_repeats": 1, "flip_x": False, "caption_dropout_rate": 0.0}
CACHED = {"cache_latents": True, "cache_latents_to_disk": False}
TOKENS_AT_ONCE = 4096  # one picture of 1024 pixels: fits wherever the model does
POINTS_OF_CURVE = 20
LEAN = "train.gradient_checkpointing: true and train.cache_text_embeddings: true"


class VerifyError(UserError, RuntimeError):
    """Runs cannot be compared as requested, or a folder belongs to another comparison."""


@dataclass(frozen=True)
class Settings:
    """How to run a comparison; `every` are steps between points of the loss curves (None: a twentieth of the run).

    `validation` is a folder that replaces held-out photos; `…_sigmas` are noise levels per photo.
    """

    steps: int | None = None
    hold_out: int | None = None
    validation: str | Path | None = None
    every: int | None = None
    curve_sigmas: int = 2
    final_sigmas: int = 8


@dataclass(frozen=True)
class ArmResult:
    """The result of one run.

    `curve` is (step, held-out loss), `final_own` that loss at the end, both in the run's own precision; `seconds` are
    those of all steps without validation; `peak_bytes` is the most device memory of a step (None: not measured).
    """

    arm: str
    seed: int
    lora: Path
    curve: tuple[tuple[int, float], ...]
    final_own: float
    seconds: float
    steps_per_s: float
    peak_bytes: int | None
    samples: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Name of the run and its folder."""
        return run_name(self.arm, self.seed)


def run_name(arm_name: str, seed: int) -> str:
    """Name and folder of a run."""
    return f"{arm_name}_seed{seed}"


@dataclass(frozen=True)
class Study:
    """An open comparison, made by `open_study`, with every default of the settings filled in.

    `datasets` are the entries to train on; `held_out` are the encoded photos that no run is trained on.
    """

    job: JobConfig
    folder: Path
    settings: Settings
    datasets: Sequence[Mapping[str, Any]]
    held_out: FixedNoise
    device: torch.device

    @property
    def steps(self) -> int:
        """Steps of each run."""
        assert self.settings.steps is not None
        return self.settings.steps

    def prepare(self, arm_name: str, arm: Arm, seed: int) -> dict[str, Any]:
        """The job of one run."""
        name = run_name(arm_name, seed)
        return prepare_job(self.job, arm, name, self.folder, seed, steps=self.steps, datasets=self.datasets)

    def train_arm(
        self, arm_name: str, arm: Arm, seed: int, *, on_step: Callable[[int], None] = lambda step: None
    ) -> ArmResult:
        """Run or resume one run, or reuse it if finished; VerifyError if its folder has a run of other settings."""
        raw = self.prepare(arm_name, arm, seed)
        run = self.folder / run_name(arm_name, seed)
        require_same_job(run, raw)

        def observe(session: Session) -> None:
            """Record the held-out loss: the curve at intervals and, at the end, the final loss."""
            step, settings = session.step, self.settings
            on_step(step)
            observed = session.record.setdefault("observed", {"curve": []})
            due = step % settings.every == 0 or step == self.steps
            if due and step not in [at for at, _ in observed["curve"]]:
                observed["curve"].append([step, self._loss(session, settings.curve_sigmas)])
            if step == self.steps:
                observed["final"] = self._loss(session, settings.final_sigmas)

        with _restored():
            COATTrainer(raw, observer=observe).train()
        on_step(self.steps)
        return read_result(run, arm_name, seed, self.steps)

    def _loss(self, session: Session, sigmas: int) -> float:
        device = session.workers.device
        with session.watch.phases.during("validate"), session.averaged():
            return loss_of(
                session.transformer, self.held_out, sigmas, as_many_as_fit, dtype=session.dtype, device=device
            )


def as_many_as_fit(shape: torch.Size) -> int:
    """How many latents (C, h, w) are predicted at once."""
    return TOKENS_AT_ONCE * 4 // shape[1:].numel()


@contextmanager
def _restored() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        gc.collect()
        torch.cuda.empty_cache()


# -- the runs ----------------------------------------------------------------------------------------------------------


def bf16_arm(job: JobConfig) -> Arm:
    """The arm that a job's COAT runs are compared with; in full fine-tuning the config's optimizer with fp32 moments.

    AdamW, rounding to nearest, would lose most updates of bf16 weights, which matters more than FP8 (RESULTS.md).
    """
    return NOTHING_IN_FP8 if job.full and job.train.optimizer == COAT_OPTIMIZER else BF16


def prepare_job(
    job: JobConfig,
    arm: Arm,
    name: str,
    folder: str | Path,
    seed: int,
    *,
    steps: int | None = None,
    datasets: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """One run of an arm, as a job that any command accepts; ConfigError if the arm's options contradict it.

    Samples are drawn at the end only, one checkpoint is kept. Without COAT the optimizer is AdamW with the same lr,
    betas, eps and weight decay, and the model is not quantized.
    """
    raw = copy.deepcopy(job.raw)
    raw["config"]["name"] = name
    process = raw["config"]["process"][0]
    for key in ("name", "log_dir", "validation"):  # the study holds out its own photos
        process.pop(key, None)
    params = dict(job.train.optimizer_params or {})
    moments = {key: value for key, value in params.items() if key in OPTIMIZER_KEYS}
    coat = _laid_over(_laid_over(process.get("coat") or {}, {"optimizer": moments}), arm)
    process.update(type=COAT_TYPE, training_folder=str(folder), training_seed=seed, coat=coat)
    train = process.setdefault("train", {})
    train.update(steps=steps or job.train.steps, skip_first_sample=True)
    train["optimizer_params"] = {key: value for key, value in params.items() if key in ADAMW_KEYS}
    process["save"] = {**(process.get("save") or {}), "max_step_saves_to_keep": 1}
    process["sample"] = {**(process.get("sample") or {}), "sample_every": train["steps"]}
    if datasets is not None:
        process["datasets"] = [dict(entry) for entry in datasets]
    enabled = coat.get("enabled", True)
    if not enabled and job.train.optimizer in EIGHT_BIT:
        train["optimizer"] = "adamw"
        train.pop("fused_backward", None)
    codes = enabled and coat.get("weight", {}).get("use_fp8", True)
    if process["model"].get("qtype") == COAT_QTYPE and not codes:
        process["model"]["quantize"] = False
    return JobConfig.from_dict(raw, file=f"{job.file} ({name})").raw


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


def read_result(folder: Path, arm_name: str, seed: int, steps: int) -> ArmResult:
    """Read a finished run of `steps` steps; VerifyError if `verify` did not finish it, ResumeError if damaged."""
    point = find_resume_point(folder, folder.name)
    observed = {} if point is None else point.record.get("observed", {})
    if point is None or "final" not in observed:
        raise VerifyError(f"{folder}: was finished without verify, so it has no held-out losses; move it elsewhere")
    run = RunFolder(folder)
    seconds = sum(value for _, value in run.metrics.get("s_per_it", []))
    phases = (run.json(MEMORY_FILE) or {}).get("phases", {})
    return ArmResult(
        arm=arm_name,
        seed=seed,
        lora=point.path,
        curve=tuple((int(step), float(loss)) for step, loss in observed["curve"]),
        final_own=float(observed["final"]),
        seconds=seconds,
        steps_per_s=steps / seconds if seconds else 0.0,
        peak_bytes=phases["step"]["peak"]["allocated"] if "step" in phases else None,
        samples=tuple(sample.path for sample in run.samples() if sample.step == steps),
    )


def require_same_job(run: Path, job: Mapping[str, Any]) -> None:
    """VerifyError if a run's folder has another saved config."""
    path = run / "config.yaml"
    if path.exists():
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        _require_same(saved.get("config"), job["config"], path, "is of a run with other settings", run)


def _require_same(saved: Any, now: Any, path: Path, problem: str, folder: Path) -> None:
    for key, old, new in _differences("", saved, now):
        raise VerifyError(f"{path}: {problem} ({key} {old!r} -> {new!r}); choose another --name; {folder} stays")


def _differences(path: str, saved: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted({*saved, *now}):
            yield from _differences(f"{path}.{key}" if path else key, saved.get(key), now.get(key))
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (old, new) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(f"{path}[{number}]", old, new)
    elif saved != now:
        yield path, saved, now


# -- opening a comparison ----------------------------------------------------------------------------------------------


def open_study(
    config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig,
    settings: Settings | None = None,
    *,
    folder: str | Path | None = None,
) -> Study:
    """Check a config, split its photos and encode those held out.

    Raises:
        UserError: the config has no COAT to compare, the photos cannot be split or encoded, the bf16 run does not fit
            the GPU, or the folder has another comparison.
    """
    job = config if isinstance(config, JobConfig) else JobConfig.load(config)
    require_packages(job)
    if not job.coat.enabled:
        raise ConfigError(
            f"{job.file}: config.process[0].coat.enabled=false: verify compares COAT with bf16; "
            f"give the config you mean to train with, with type: {COAT_TYPE} and coat.enabled: true"
        )
    device = _device_of(job)
    provide_embedded(job.model.name_or_path)
    folder = Path(folder) if folder is not None else job.folder.with_name(f"{job.folder.name}_verify")
    settings = settings or Settings()
    steps = settings.steps or job.train.steps
    settings = replace(settings, steps=steps, every=settings.every or max(1, steps // POINTS_OF_CURVE))
    bf16 = prepare_job(job, BF16, "bf16", folder, 0)
    require_room(JobConfig.from_dict(bf16, file=job.file), device)
    train, held_out = _split(job, settings, folder)
    raw = prepare_job(job, BF16, "held_out", folder, 0, datasets=held_out)
    with _restored():
        photos = encode_held_out(JobConfig.from_dict(raw, file=job.file), device)
    return Study(job, folder, settings, train, photos, device)


def _device_of(job: JobConfig) -> torch.device:
    workers = Workers(job.device)
    try:
        if workers.size > 1:
            raise VerifyError(f"{workers.size} processes: verify runs in one; start it without accelerate launch")
        return workers.device
    finally:
        workers.close()


def require_room(bf16: JobConfig, device: torch.device, memory_bytes: float | None = None) -> None:
    """VerifyError, with the memory needed and remedies, if the plan finds the bf16 run too large for the GPU."""
    if device.type != "cuda":
        return
    if memory_bytes is None:
        memory_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    verdict = make_plan(bf16, memory_bytes / 1e9).verdicts[0]
    if verdict.fits:
        return
    train = replace(bf16.train, gradient_checkpointing=True)
    entries = tuple(replace(entry, cache_text_embeddings=True, shuffle_tokens=False) for entry in bf16.datasets)
    lean = make_plan(replace(bf16, train=train, datasets=entries), memory_bytes / 1e9).verdicts[0]
    needed, lean_needed = (one.prediction.peak / USABLE_FRACTION / 1e9 for one in (verdict, lean))
    weights = verdict.prediction.phases[0].parts["transformer"] / 1e9
    remedy = f"write {LEAN}: with both it fits"
    if not lean.fits:
        remedy = f"run verify once on a larger card, {lean_needed:.0f} GB are enough with {LEAN}"
    raise VerifyError(
        f"{bf16.file}: verify compares with a bf16 run, which needs a GPU of about {needed:.0f} GB (its weights alone "
        f"{weights:.1f} GB); this one has {memory_bytes / 1e9:.0f} GB\n{remedy}"
    )


# -- the photos --------------------------------------------------------------------------------------------------------


def _split(job: JobConfig, settings: Settings, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Entries of `datasets` to train on and to validate on, as saved in `folder`, or split now."""
    entries = [dict(entry) for entry in job.raw["config"]["process"][0]["datasets"]]
    asked, folders = asdict(settings), list(entries)
    if settings.validation is not None:
        asked["validation"] = str(settings.validation)
        folders.append({**entries[0], "folder_path": asked["validation"]})
    model = model_identity(job.model.name_or_path)
    identity = {"model": model, "trigger_word": job.trigger_word, "settings": asked, "data": data_identity(folders)}
    path = folder / "study.json"
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        _require_same(saved["study"], identity, path, "is of another comparison", folder)
        return saved["split"]["train"], saved["split"]["held_out"]
    if settings.validation is not None:
        train, held_out = entries, [validation_entry(entries[0], Path(settings.validation))]
    else:
        train, held_out = split_photos(entries, folder / "photos", settings.hold_out)
    split = {"train": train, "held_out": held_out}
    write_file(path, json.dumps({"study": identity, "split": split}, indent=1) + "\n")
    return train, held_out


def held_out_count(photos: int) -> int:
    """A tenth of the photos, from 1 to 16."""
    return min(max(1, round(photos * HELD_OUT_SHARE)), MOST_HELD_OUT)


def choose_held_out(photos: Sequence[Path], count: int | None) -> list[Path]:
    """Photos to hold out, evenly spread over the sorted list, so the same everywhere; VerifyError if none is left."""
    distinct = list(dict.fromkeys(path.resolve() for path in photos))
    wanted = held_out_count(len(distinct)) if count is None else count
    if wanted < 1 or wanted >= len(distinct):
        raise VerifyError(
            f"--hold-out {wanted}: must be from 1 to {len(distinct) - 1}, there are {len(distinct)} photos and the "
            "others are trained on; give --validation FOLDER with other photos of the same thing to train on all"
        )
    return [distinct[(2 * i + 1) * len(distinct) // (2 * wanted)] for i in range(wanted)]


def split_photos(
    entries: Sequence[Mapping[str, Any]], folder: Path, count: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Replace `folder` by links to photos and captions, split in two; a photo of several datasets is in one half."""
    photos = [find_images(Path(entry["folder_path"])) for entry in entries]
    chosen = set(choose_held_out([path for paths in photos for path in paths], count))
    remove(folder)
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    left = set(chosen)
    for number, (entry, paths) in enumerate(zip(entries, photos, strict=True)):
        rest = [path for path in paths if path.resolve() not in chosen]
        out = [path for path in paths if path.resolve() in left]
        left -= {path.resolve() for path in out}
        if rest:
            train.append({**entry, "folder_path": _linked(rest, entry, folder / "train" / str(number))})
        if out:
            place = _linked(out, entry, folder / "held_out" / str(number))
            held_out.append({**entry, **EACH_ONCE, **CACHED, "folder_path": place})
    return train, held_out


def _linked(photos: Sequence[Path], entry: Mapping[str, Any], place: Path) -> str:
    """A folder of hard links to photos and captions (copies where there are none)."""
    root = Path(entry["folder_path"])
    for photo in photos:
        for path in (photo, caption_file(photo, entry.get("caption_ext") or "txt")):
            if path.is_file():
                target = place / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path.resolve(), target)
    return str(place)


def validation_entry(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Photos of another folder to validate on, with the settings of a dataset."""
    if not folder.is_dir():
        raise VerifyError(f"--validation {folder}: folder not found; give one with images and captions")
    if not find_images(folder):
        raise VerifyError(f"--validation {folder}: has no images; put some there, with captions as for training")
    return {**entry, **EACH_ONCE, **CACHED, "folder_path": str(folder)}


def encode_held_out(job: JobConfig, device: torch.device) -> FixedNoise:
    """Encode the photos of a job's datasets, each at one of its resolutions in turn."""
    photos = job.coat.data
    policy = {"background": photos.background, "transparency": photos.transparency}
    samples = inspect_datasets(job.datasets, job.trigger_word, **policy).usable()
    encoders = load_encoders(job.model.name_or_path, TORCH_DTYPES[job.train.dtype], job.model.extras_name_or_path)
    chosen = one_each(samples)
    dataset = LatentDataset(
        chosen,
        job.datasets,
        encoders.vae,
        encoders.text,
        device,
        background=photos.background,
        transparency=photos.transparency,
    )
    dataset.fill()
    if dataset.encoders is not None:
        for model in encoders.text.models:
            model.to(device)
    encoded = [dataset.encoded(sample, sample.caption) for sample in chosen]
    return FixedNoise(encoded, [sample.image_path.name for sample in chosen])
