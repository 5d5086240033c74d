"""A job both hosts take, and how a malformed one is described: what is wrong, for whom, what the answer must say."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

BOTH = ("standalone", "ai-toolkit")
ALONE, AITK = ("standalone",), ("ai-toolkit",)

PROCESS: dict[str, Any] = {
    "type": "coat_flux_trainer",
    "training_folder": "output",
    "device": "cuda",
    "trigger_word": "coatwear",
    "training_seed": 42,
    "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
    "save": {"dtype": "float16", "save_every": 250, "max_step_saves_to_keep": 4},
    "datasets": [
        {
            "folder_path": "photos",
            "caption_ext": "txt",
            "caption_dropout_rate": 0.05,
            "cache_latents_to_disk": True,
            "resolution": [512, 768],
        },
        {"folder_path": "details", "num_repeats": 2, "resolution": 1024},
    ],
    "train": {
        "batch_size": 1,
        "steps": 1500,
        "gradient_accumulation": 2,
        "gradient_checkpointing": True,
        "noise_scheduler": "flowmatch",
        "timestep_type": "sigmoid",
        "optimizer": "coat_fp8_adamw",
        "optimizer_params": {"weight_decay": 1e-2, "betas": [0.9, 0.999]},
        "lr": 1e-4,
        "lr_scheduler": "cosine",
        "lr_scheduler_params": {"eta_min": 1e-6},
        "ema_config": {"use_ema": True, "ema_decay": 0.99},
        "max_grad_norm": 1.0,
        "dtype": "bf16",
    },
    "model": {"name_or_path": "models/flux", "is_flux": True, "quantize": True, "qtype": "coat_fp8"},
    "sample": {
        "sampler": "flowmatch",
        "sample_every": 250,
        "width": 1024,
        "height": 1024,
        "prompts": ["[trigger], a red shirt", "a woman in a coatwear dress"],
        "neg": "",
        "seed": 42,
        "walk_seed": True,
        "guidance_scale": 4,
        "sample_steps": 20,
    },
    "logging": {"log_every": 100},
    "coat": {
        "enabled": True,
        "optimizer": {"m1_format": "e4m3", "m2_format": "e5m2", "block_size": 128},
        "weight": {"use_fp8": True, "granularity": "per_row"},
        "activation": {"format": "e4m3", "grad_format": "e5m2", "exclude": ["transformer_blocks.0.*"]},
        "memory": {"checkpointing": "auto", "budget_gb": 22.5},
        "data": {"background": "white"},
        "guard": {"enabled": True},
        "resume": {"allow": ["data"]},
        "fallback": "bf16",
    },
}


class _Dumper(yaml.SafeDumper):
    """Quotes the text 1e-4, which the host's loader reads as a number; writes nothing as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+"), list("-+0123456789"))


def valid_job() -> dict[str, Any]:
    """A job both hosts take without a warning."""
    return {
        "job": "extension",
        "config": {"name": "run", "process": [copy.deepcopy(PROCESS)]},
        "meta": {"name": "[name]", "version": "1.0"},
    }


@dataclass(frozen=True)
class BadConfig:
    """One malformed config.

    Args:
        name: of the case.
        words: all of them are in the finding.
        hosts: who must refuse it.
        changes: dotted key of the process entry (of the job, where it starts with /) → value; ... removes the key.
        text: the file itself, in place of the valid job with changes.
        suffix: of the file.
    """

    name: str
    words: tuple[str, ...]
    hosts: tuple[str, ...] = BOTH
    changes: tuple[tuple[str, Any], ...] = ()
    text: str | bytes | None = None
    suffix: str = ".yaml"

    def content(self) -> bytes:
        """What is in the file."""
        if self.text is not None:
            return self.text if isinstance(self.text, bytes) else self.text.encode()
        job = valid_job()
        for dotted, value in self.changes:
            _set(job if dotted.startswith("/") else job["config"]["process"][0], dotted.lstrip("/"), value)
        if self.suffix == ".json":
            return json.dumps(job).encode()
        return yaml.dump(job, Dumper=_Dumper, sort_keys=False).encode()


def _set(place: Any, dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
    if value is ...:
        del place[leaf]
    elif isinstance(place, list):
        place[int(leaf)] = value
    else:
        place[leaf] = value
