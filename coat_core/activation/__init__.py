"""FP8 saved for backward: adapter inputs, saved tensors of other operators, checkpointed block inputs."""

from coat_core.activation.layers import FP8InputLinear
from coat_core.activation.packing import SAVED_IN_FP8, PackedSavedTensors, Saving, fp8_checkpoint, may_draw

__all__ = ["SAVED_IN_FP8", "FP8InputLinear", "PackedSavedTensors", "Saving", "fp8_checkpoint", "may_draw"]
