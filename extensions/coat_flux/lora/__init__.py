"""LoRA adapters on FP8 base linears, for PEFT's and ai-toolkit's kinds."""

from .attach import LoraReport, attach_lora

__all__ = ["LoraReport", "attach_lora"]
