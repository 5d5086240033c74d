"""The blocks of a job under ai-toolkit's key names and defaults, as far as the stand-alone trainer supports them.

Two defaults differ, because ai-toolkit's (`ddpm`) cannot train FLUX: `train.noise_scheduler` and `sample.sampler` are
`flowmatch`. Sizes are in pixels, rates are probabilities from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .options import blocks, choice, key, switch

DTYPES = dict.fromkeys(("float16", "fp16", "half"), "fp16")
DTYPES |= dict.fromkeys(("bf16", "bfloat16"), "bf16")
DTYPES |= dict.fromkeys(("fp32", "float32", "float", "single"), "fp32")
PRODIGY_LOW_LR = 0.1  # below it lr is 1, as in ai-toolkit
LR_SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts")
TIMESTEP_TYPES = ("sigmoid", "linear", "weighted", "shift", "flux_shift", "lumina2_shift", "lognorm_blend")
TIMESTEP_TYPES += ("one_step", "two_step", "four_step", "eight_step")


@dataclass(frozen=True)
class NetworkKwargs:
    """Which linears get an adapter: words are substrings of `transformer.<full name>`."""

    only_if_contains: tuple[str, ...] | None = key(None, "strings", "only these names; null: all", nullable=True)
    ignore_if_contains: tuple[str, ...] = key((), "strings")


@dataclass(frozen=True)
class NetworkSection:
    """`network`: the LoRA or LoKr. On FLUX ai-toolkit forces alpha = rank, and so do we."""

    type: str = choice(("lora", "lokr"))
    linear: int = key(4, "int", minimum=1, maximum=4096)
    linear_alpha: float | None = key(None, "float", nullable=True, above=0)
    rank: int | None = key(None, "int", nullable=True, minimum=1, maximum=4096)
    alpha: float | None = key(None, "float", nullable=True, above=0)
    dropout: float | None = key(None, "float", nullable=True, minimum=0, below=1)
    lokr_full_rank: bool = switch(True)
    lokr_factor: int = key(-1, "int", minimum=-1)
    transformer_only: bool = switch(True)
    network_kwargs: NetworkKwargs = field(default_factory=NetworkKwargs)

    @property
    def title(self) -> str:
        """In words."""
        if self.type == "lora":
            return f"LoRA rank {self.linear}"
        rank = "full rank" if self.lokr_rank is None else f"rank {self.linear}"
        return f"LoKr factor {self.lokr_factor}, {rank}"

    @property
    def lokr_rank(self) -> int | None:
        """Of a LoKr's W2; None where it is whole."""
        return None if self.lokr_full_rank else self.linear


@dataclass(frozen=True)
class SaveSection:
    """`save`: checkpoints."""

    dtype: str = choice(DTYPES)
    save_every: int = key(1000, "int", minimum=1)
    max_step_saves_to_keep: int = key(5, "int", minimum=1)


@dataclass(frozen=True)
class DatasetSection:
    """One entry of `datasets`: a folder of images with their captions."""

    folder_path: str = key(None, "str", required=True)
    caption_ext: str = key(".txt", "str")
    default_caption: str | None = key(None, "str", nullable=True)
    caption_dropout_rate: float = key(0.0, "float", minimum=0, maximum=1)
    shuffle_tokens: bool = switch(False)
    cache_latents: bool = switch(False)
    cache_latents_to_disk: bool = switch(False)
    cache_text_embeddings: bool = switch(False)
    resolution: tuple[int, ...] = key((512,), "sizes", minimum=32, maximum=8192)
    num_repeats: int = key(1, "int", minimum=1)
    flip_x: bool = switch(False)
    buckets: bool = switch(True, "keep aspect ratios; false: square crops")
    mask_path: str | None = key(None, "str", "a folder of loss masks; white is trained, black is not", nullable=True)
    mask_min_value: float = key(0.0, "float", "the weight of black", minimum=0, maximum=1)
    invert_mask: bool = switch(False)
    alpha_mask: bool = switch(False, "the photos' alpha channels are their masks")
    is_reg: bool = switch(False, "regularization photos, in every second step, without the trigger word")
    media: tuple[str, ...] = ()  # not a key: extensions of videos or sounds to read


@dataclass(frozen=True)
class EMASection:
    """`train.ema_config`."""

    use_ema: bool = switch(False)
    ema_decay: float = key(0.999, "float", minimum=0, maximum=1)
    use_feedback: bool = switch(False)
    param_multiplier: float = key(1.0, "float", above=0)


@dataclass(frozen=True)
class TrainSection:
    """`train`; what `timestep_type` and `content_or_style` draw: `trainers/standalone/flow_matching.py`."""

    batch_size: int = key(1, "int", minimum=1)
    steps: int = key(1000, "int", minimum=1)
    gradient_accumulation: int = key(1, "int", minimum=1)
    gradient_accumulation_steps: int = key(1, "int", "old name, only 1; see gradient_accumulation")
    gradient_checkpointing: bool = switch(True)
    fused_backward: bool = switch(False, "full fine-tuning: weights are updated in backward, gradients freed at once")
    noise_scheduler: str = choice(("flowmatch",))
    timestep_type: str = choice(TIMESTEP_TYPES)
    content_or_style: str = choice(("balanced", "content", "style"))
    min_denoising_steps: int = key(0, "int", minimum=0, maximum=999)
    max_denoising_steps: int = key(999, "int", minimum=0, maximum=999)
    bypass_guidance_embedding: bool = switch(False)
    linear_timesteps: bool = switch(False, "even noise levels, loss weighted by a bell")
    linear_timesteps2: bool = switch(False, "the same, with the low-noise half of the bell flat")
    loss_type: str = choice(("mse", "mae", "pseudo_huber"))
    optimizer: str = choice(("adamw", "adam", "adamw8bit", "prodigy", "adafactor", "lion", COAT_OPTIMIZER))
    optimizer_params: Mapping[str, Any] | None = key(None, "mapping", nullable=True)
    lr: float = key(1e-6, "float", above=0, example=1e-4)
    lr_scheduler: str = choice(LR_SCHEDULERS)
    lr_scheduler_params: Mapping[str, Any] | None = key(None, "mapping", nullable=True)
    max_grad_norm: float = key(1.0, "float", "with fused_backward each weight's gradient by itself", above=0)
    ema_config: EMASection = field(default_factory=EMASection)
    dtype: str = key("fp32", "choice", choices=tuple(DTYPES))
    reg_weight: float = key(1.0, "float", "of the loss on photos with is_reg", above=0)
    skip_first_sample: bool = switch(False)
    disable_sampling: bool = switch(False)
    cache_text_embeddings: bool = switch(False)


@dataclass(frozen=True)
class ModelSection:
    """`model`. The stand-alone trainer quantizes as `coat.weight` says; `quantize` and `qtype` must not contradict."""

    name_or_path: str = key(None, "str", "a diffusers folder, a hub name, or a FLUX.1 .safetensors file", required=True)
    extras_name_or_path: str | None = key(None, "str", "where VAE and text encoders come from", nullable=True)
    is_flux: bool = switch(False)
    arch: str | None = key(None, "str", "`rules.STANDALONE_ARCHS`; flux: as is_flux", nullable=True)
    quantize: bool = switch(False)
    qtype: str = key("qfloat8", "str", COAT_QTYPE)


@dataclass(frozen=True)
class SampleItem:
    """One entry of `sample.samples`; null inherits the value of `sample`."""

    prompt: str = key(None, "str", required=True)
    width: int | None = key(None, "int", nullable=True, minimum=16, maximum=8192, multiple_of=16)
    height: int | None = key(None, "int", nullable=True, minimum=16, maximum=8192, multiple_of=16)
    seed: int | None = key(None, "int", nullable=True, minimum=0)
    guidance_scale: float | None = key(None, "float", nullable=True, minimum=0)
    sample_steps: int | None = key(None, "int", nullable=True, minimum=1)


@dataclass(frozen=True)
class SampleSection:
    """`sample`: images drawn during the run."""

    sampler: str = choice(("flowmatch",))
    sample_every: int = key(100, "int", minimum=1)
    sample_start_step: int = key(0, "int", minimum=0)
    width: int = key(512, "int", minimum=16, maximum=8192, multiple_of=16)
    height: int = key(512, "int", minimum=16, maximum=8192, multiple_of=16)
    prompts: tuple[str, ...] = key((), "strings", "what to draw; [trigger] becomes the trigger word")
    samples: tuple[SampleItem, ...] = blocks(SampleItem)
    seed: int = key(0, "int", minimum=0)
    walk_seed: bool = switch(False, "the next image has the next seed")
    guidance_scale: float = key(7.0, "float", minimum=0)
    sample_steps: int = key(20, "int", minimum=1)
    format: str = choice(("jpg", "png", "webp"))

    def items(self) -> tuple[SampleItem, ...]:
        """The images of one set; as in ai-toolkit an entry's seed also applies to later ones unless `walk_seed`."""
        items, seed = [], self.seed
        for i, item in enumerate(self.samples or [SampleItem(prompt=prompt) for prompt in self.prompts]):
            if item.seed is not None:
                seed = item.seed
            elif self.walk_seed:
                seed = self.seed + i
            values = {"prompt": item.prompt, "seed": seed}
            for name in ("width", "height", "guidance_scale", "sample_steps"):
                own = getattr(item, name)
                values[name] = getattr(self, name) if own is None else own
            items.append(SampleItem(**values))
        return tuple(items)


@dataclass(frozen=True)
class ValidationSection:
    """`validation`: photos not trained on, and the steps between measurements of their loss; also in ai-toolkit."""

    hold_out: int | tuple[str, ...] | None = key(None, "count or names", minimum=1, required=True)
    every: int = key(100, "int", minimum=1)
    fidelity: bool = switch(False, "redraw held-out photos at each save, and compare colour and texture")


@dataclass(frozen=True)
class LoggingSection:
    """`logging`."""

    log_every: int = key(100, "int", minimum=1)
    verbose: bool = switch(False, "coat/log.txt on the console, too")
    use_wandb: bool = switch(False)
    project_name: str = key("ai-toolkit", "str")
    run_name: str | None = key(None, "str", "in W&B; null: made up there", nullable=True)


PROCESS_TYPES = (COAT_TYPE, "sd_trainer", "diffusion_trainer", "ui_trainer")
