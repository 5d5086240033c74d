"""What diffusers' own FLUX LoRA loader makes of a file's tensors, without a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .layouts import PREFIXES, Pair

__all__ = ["diffusers_refusal"]


def diffusers_refusal(tensors: Mapping[str, Tensor], wanted: Mapping[str, Pair]) -> str | None:
    """Return why `FluxPipeline.load_lora_weights` would not load all of a file, or None where it does.

    Its conversion is run on the tensors; it then hands modules with the prefix `transformer.` to PEFT and drops others.

    Args:
        tensors: of the file.
        wanted: the adapters by diffusers' module name, as we read them.
    """
    try:
        from diffusers.loaders import FluxLoraLoaderMixin
    except ImportError as error:
        return f"not checked, it cannot be imported ({error})"
    try:
        found: dict[str, Tensor] = FluxLoraLoaderMixin.lora_state_dict(dict(tensors))
    except (AssertionError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"it refuses the file ({type(error).__name__}: {' '.join(str(error).split())[:200] or 'no message'})"
    prefix = PREFIXES["diffusers"]
    for module, pair in wanted.items():
        for name, matrix, dim in (("lora_A", pair.down, 1), ("lora_B", pair.up, 0)):
            theirs = found.get(f"{prefix}{module}.{name}.weight")
            if theirs is None:
                return f"it drops {module} without a word"
            if theirs.shape[dim] != matrix.shape[dim]:
                return f"it reads {module}.{name} as {tuple(theirs.shape)}, not {tuple(matrix.shape)}"
    return None
