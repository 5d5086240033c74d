"""FP8 saved for backward: adapter inputs, saved tensors of other operators, checkpointed block inputs."""

from coat_core.activation.adapter import FP8InputLinear
from coat_core.activation.checkpoint import fp8_checkpoint, may_draw
from coat_core.activation.packing import PackedSavedTensors, PackingConfig

__all__ = ["FP8InputLinear", "PackedSavedTensors", "PackingConfig", "fp8_checkpoint", "may_draw"]
