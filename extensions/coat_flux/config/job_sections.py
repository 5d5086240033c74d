"""The blocks of a job under ai-toolkit's own key names and defaults, as far as the stand-alone trainer supports them.

Two defaults differ, because ai-toolkit's (`ddpm`) cannot train FLUX: `train.noise_scheduler` and `sample.sampler` are
`flowmatch`. Sizes are in pixels, `lr` is what the optimizer takes, rates are probabilities from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .build import blocks, key
from .coat import COATConfig

DTYPES = {
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "single": "fp32",
}
TRAIN_DTYPES = ("fp32", "float32", "float", "single", "bf16", "bfloat16")
OPTIMIZERS = ("adamw", "adam", "adamw8bit", "prodigy", "adafactor", "lion", COAT_OPTIMIZER)
_OTHER_OPTIMIZERS = (
    *("adamw8", "adam8", "adam8bit", "ademamix8bit", "lion8bit", "adagrad", "prodigy8bit"),
    *("automagic", "automagic2", "automagic3", "automagicexperiment"),
    *("dadaptation", "dadaptationadam", "dadaptationlion"),
)
LR_SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts")
TIMESTEP_TYPES = (
    "sigmoid",
    "linear",
    "weighted",
    "shift",
    "flux_shift",
    "lumina2_shift",
    "lognorm_blend",
    "one_step",
    "two_step",
    "four_step",
    "eight_step",
)
_ONLY_AITK = "not supported by the stand-alone trainer; run this config inside ai-toolkit, or write {}"
_OTHER_ADAPTERS = (
    *((name, _ONLY_AITK.format("lora")) for name in ("lokr", "dora")),
    ("loha", "neither the stand-alone trainer nor ai-toolkit trains it; write lora, or lokr inside ai-toolkit"),
)
_FP16 = "FLUX overflows in fp16; write bf16"


def _off(default: bool, doc: str, wrong: str) -> Any:
    return key(default, "bool", doc, refused=((not default, wrong),))


@dataclass(frozen=True)
class NetworkKwargs:
    """Which linears get an adapter: words are substrings of `transformer.<full name>`."""

    only_if_contains: tuple[str, ...] | None = key(None, "strings", "only these names; null: all", nullable=True)
    ignore_if_contains: tuple[str, ...] = key((), "strings", "not these names")


@dataclass(frozen=True)
class NetworkSection:
    """`network`: the LoRA. On FLUX ai-toolkit has alpha = rank whatever is written; so have we."""

    type: str = key("lora", "choice", "kind of adapter", choices=("lora",), refused=_OTHER_ADAPTERS)
    linear: int = key(4, "int", "rank", minimum=1, maximum=4096)
    linear_alpha: float | None = key(None, "float", "equal to linear", nullable=True, above=0)
    rank: int | None = key(None, "int", "old name of linear", nullable=True, minimum=1, maximum=4096)
    alpha: float | None = key(None, "float", "old name of linear_alpha", nullable=True, above=0)
    dropout: float | None = key(None, "float", "dropout of the adapters", nullable=True, minimum=0, below=1)
    transformer_only: bool = key(True, "bool", "adapters only in the transformer blocks")
    network_kwargs: NetworkKwargs = field(default_factory=NetworkKwargs)


@dataclass(frozen=True)
class SaveSection:
    """`save`: checkpoints."""

    dtype: str = key("float16", "choice", "precision of the saved LoRA", choices=tuple(DTYPES))
    save_every: int = key(1000, "int", "steps from one checkpoint to the next", minimum=1)
    max_step_saves_to_keep: int = key(5, "int", "older checkpoints are removed", minimum=1)
    push_to_hub: bool = _off(False, "upload", _ONLY_AITK.format("false"))


@dataclass(frozen=True)
class DatasetSection:
    """One entry of `datasets`: a folder of images with captions beside them."""

    folder_path: str = key(None, "str", "folder of images", required=True)
    caption_ext: str = key(".txt", "str", "extension of the caption files")
    default_caption: str | None = key(None, "str", "for images without caption", nullable=True)
    caption_dropout_rate: float = key(0.0, "float", "part of the captions left empty", minimum=0, maximum=1)
    shuffle_tokens: bool = key(False, "bool", "shuffle the caption's comma-separated parts")
    cache_latents: bool = key(False, "bool", "encode images once, keep in memory")
    cache_latents_to_disk: bool = key(False, "bool", "encode images once, keep on disk")
    cache_text_embeddings: bool = key(False, "bool", "encode captions once, keep on disk")
    resolution: tuple[int, ...] = key((512,), "sizes", "one or several resolutions", minimum=32, maximum=8192)
    num_repeats: int = key(1, "int", "times each image is seen in an epoch", minimum=1)
    flip_x: bool = key(False, "bool", "mirrored copies as well")
    buckets: bool = key(True, "bool", "keep aspect ratios; false: square crops")


@dataclass(frozen=True)
class EMASection:
    """`train.ema_config`."""

    use_ema: bool = key(False, "bool", "save and sample the moving average")
    ema_decay: float = key(0.999, "float", "weight of the old average", minimum=0, maximum=1)
    use_feedback: bool = key(False, "bool", "feed the average back into the parameters")
    param_multiplier: float = key(1.0, "float", "multiplies the parameters after each update", above=0)


@dataclass(frozen=True)
class TrainSection:
    """`train`.

    `timestep_type` names the table of 1000 noise levels, high to low, from which a step draws: `sigmoid` redraws
    1 - sigmoid(N(0, 1)); `linear` is even; `weighted` too, but levels count differently in the loss; `shift`,
    `flux_shift` and `lumina2_shift` are the scheduler's own shift (by resolution where it is dynamic); `lognorm_blend`
    is 3/4 log-normal and 1/4 even; `one_step` … `eight_step` use that many evenly spaced levels. `content_or_style`
    bends the draw: `content` to high noise, `style` to low.
    """

    batch_size: int = key(1, "int", "images per micro-batch and process", minimum=1)
    steps: int = key(1000, "int", "optimizer steps", minimum=1)
    gradient_accumulation: int = key(1, "int", "micro-batches per optimizer step", minimum=1)
    gradient_accumulation_steps: int = key(1, "int", "old name, only 1; see gradient_accumulation")
    train_unet: bool = _off(True, "train the transformer", "there is nothing else to train here; write true")
    train_text_encoder: bool = _off(False, "train the text encoders", _ONLY_AITK.format("false"))
    gradient_checkpointing: bool = key(True, "bool", "blocks may be recomputed in backward")
    noise_scheduler: str = key("flowmatch", "choice", "the objective", choices=("flowmatch",))
    timestep_type: str = key(
        "sigmoid",
        "choice",
        "how noise levels are drawn",
        choices=TIMESTEP_TYPES,
        refused=tuple((name, _ONLY_AITK.format("sigmoid")) for name in ["next_sample"]),
    )
    content_or_style: str = key("balanced", "choice", "bends the draw", choices=("balanced", "content", "style"))
    min_denoising_steps: int = key(0, "int", "smallest index drawn", minimum=0, maximum=999)
    max_denoising_steps: int = key(999, "int", "index the draw stays below", minimum=0, maximum=999)
    bypass_guidance_embedding: bool = key(False, "bool", "train without the guidance embedding")
    linear_timesteps: bool = key(False, "bool", "even noise levels, loss weighted by a bell")
    linear_timesteps2: bool = key(False, "bool", "the same, with the low-noise half of the bell flat")
    loss_type: str = key("mse", "choice", "the loss", choices=("mse", "mae", "pseudo_huber"))
    optimizer: str = key(
        "adamw",
        "choice",
        "optimizer",
        choices=OPTIMIZERS,
        refused=tuple((name, _ONLY_AITK.format("one of " + ", ".join(OPTIMIZERS))) for name in _OTHER_OPTIMIZERS),
    )
    optimizer_params: Mapping[str, Any] | None = key(None, "mapping", "its further arguments", nullable=True)
    lr: float = key(1e-6, "float", "learning rate", above=0, example=1e-4)
    lr_scheduler: str = key("constant", "choice", "course of the learning rate", choices=LR_SCHEDULERS)
    lr_scheduler_params: Mapping[str, Any] | None = key(None, "mapping", "its further arguments", nullable=True)
    max_grad_norm: float = key(1.0, "float", "gradients are clipped to this norm", above=0)
    ema_config: EMASection = field(default_factory=EMASection)
    dtype: str = key(
        "fp32",
        "choice",
        "precision of the frozen model",
        choices=TRAIN_DTYPES,
        refused=tuple((name, _FP16) for name in ("fp16", "float16", "half")),
    )
    skip_first_sample: bool = key(False, "bool", "no samples before the first step")
    disable_sampling: bool = key(False, "bool", "no samples at all")
    cache_text_embeddings: bool = key(False, "bool", "as cache_text_embeddings of every dataset")


@dataclass(frozen=True)
class ModelSection:
    """`model`. The stand-alone trainer quantizes as `coat.weight` says; `quantize` and `qtype` must not contradict."""

    name_or_path: str = key(None, "str", "a diffusers folder, a hub name, or a FLUX.1 .safetensors file", required=True)
    extras_name_or_path: str | None = key(None, "str", "where VAE and text encoders come from", nullable=True)
    is_flux: bool = key(False, "bool", "FLUX.1")
    arch: str | None = key(None, "str", "flux, as is_flux: true", nullable=True)
    quantize: bool = key(False, "bool", "quantize the frozen transformer")
    qtype: str = key("qfloat8", "str", COAT_QTYPE)


@dataclass(frozen=True)
class SampleItem:
    """One entry of `sample.samples`; null takes the value of `sample`."""

    prompt: str = key(None, "str", "what to draw", required=True)
    width: int | None = key(None, "int", "pixels", nullable=True, minimum=16, maximum=8192, multiple_of=16)
    height: int | None = key(None, "int", "pixels", nullable=True, minimum=16, maximum=8192, multiple_of=16)
    seed: int | None = key(None, "int", "seed", nullable=True, minimum=0)
    guidance_scale: float | None = key(None, "float", "guidance embedding", nullable=True, minimum=0)
    sample_steps: int | None = key(None, "int", "denoising steps", nullable=True, minimum=1)


@dataclass(frozen=True)
class SampleSection:
    """`sample`: images drawn during the run."""

    sampler: str = key("flowmatch", "choice", "sampler", choices=("flowmatch",))
    sample_every: int = key(100, "int", "steps from one set of samples to the next", minimum=1)
    sample_start_step: int = key(0, "int", "no samples before this step", minimum=0)
    width: int = key(512, "int", "pixels", minimum=16, maximum=8192, multiple_of=16)
    height: int = key(512, "int", "pixels", minimum=16, maximum=8192, multiple_of=16)
    prompts: tuple[str, ...] = key((), "strings", "what to draw; [trigger] becomes the trigger word")
    samples: tuple[SampleItem, ...] = blocks(SampleItem)
    seed: int = key(0, "int", "seed of the first image", minimum=0)
    walk_seed: bool = key(False, "bool", "the next image has the next seed")
    guidance_scale: float = key(7.0, "float", "guidance embedding", minimum=0)
    sample_steps: int = key(20, "int", "denoising steps", minimum=1)
    format: str = key("jpg", "choice", "file format", choices=("jpg", "png", "webp"))

    def items(self) -> tuple[SampleItem, ...]:
        """The images of one set, in order, with size, seed, guidance and steps filled in.

        As in ai-toolkit an entry's own seed also holds for the entries after it, unless `walk_seed` is on.
        """
        wanted = self.samples or tuple(SampleItem(prompt=prompt) for prompt in self.prompts)
        items = []
        seed = self.seed
        for i, item in enumerate(wanted):
            if self.walk_seed:
                seed = self.seed + i
            if item.seed is not None:
                seed = item.seed
            own = {name: getattr(item, name) for name in ("width", "height", "guidance_scale", "sample_steps")}
            filled = {name: getattr(self, name) if value is None else value for name, value in own.items()}
            items.append(SampleItem(prompt=item.prompt, seed=seed, **filled))
        return tuple(items)


@dataclass(frozen=True)
class ValidationSection:
    """`validation`: photos that are not trained on, and how often the loss on them is measured; also in ai-toolkit."""

    hold_out: int | tuple[str, ...] | None = key(
        None, "count or names", "photos not trained on", minimum=1, required=True
    )
    every: int = key(100, "int", "steps from one measurement to the next", minimum=1)


@dataclass(frozen=True)
class LoggingSection:
    """`logging`."""

    log_every: int = key(100, "int", "steps from one log entry to the next", minimum=1)
    verbose: bool = key(False, "bool", "what goes to coat/log.txt is shown on the console, too")
    use_wandb: bool = key(False, "bool", "log to Weights & Biases as well")
    project_name: str = key("ai-toolkit", "str", "project there")
    run_name: str | None = key(None, "str", "name of the run there; null: W&B makes one up", nullable=True)


PROCESS_TYPES = (COAT_TYPE, "sd_trainer", "diffusion_trainer", "ui_trainer")


@dataclass(frozen=True)
class Job:
    """One job, with every default filled in: the process entry under ai-toolkit's names.

    And `file`, the YAML's path for errors; `meta`, the user's own metadata; `notes`, lines the user should see; `raw`,
    the job as read; `written`, the same with every `${VARIABLE}` unexpanded, for what is stored.
    """

    name: str | None = key(None, "str", "name of the run", nullable=True)
    type: str = key(COAT_TYPE, "choice", "process type", choices=PROCESS_TYPES, required=True)
    training_folder: str = key(None, "str", "where runs are saved", required=True)
    device: str | None = key(None, "str", "cuda, cuda:0, mps or cpu; null: the best there is", nullable=True)
    trigger_word: str | None = key(None, "str", "goes into every caption", nullable=True)
    training_seed: int | None = key(None, "int", "seed of the run", nullable=True, minimum=0)
    log_dir: str | None = key(None, "str", "folder for TensorBoard", nullable=True)
    performance_log_every: int = key(0, "int", "steps from one timing line to the next; 0: never", minimum=0)
    network: NetworkSection = field(default_factory=NetworkSection)
    save: SaveSection = field(default_factory=SaveSection)
    datasets: tuple[DatasetSection, ...] = blocks(DatasetSection)
    train: TrainSection = field(default_factory=TrainSection)
    model: ModelSection = field(default_factory=ModelSection)
    sample: SampleSection = field(default_factory=SampleSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    coat: COATConfig = field(default_factory=COATConfig)
    file: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """`<training_folder>/<name>`."""
        return Path(self.training_folder) / str(self.name)
