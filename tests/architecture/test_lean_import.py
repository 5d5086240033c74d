"""The names that users import are there, and importing them needs no heavy package and touches no GPU."""

import subprocess
import sys

import pytest

import coat_core
import coat_flux
from tests.architecture.sources import ROOT

HEAVY = ("triton", "diffusers", "transformers", "peft", "accelerate")
NAMES = {
    coat_core: {
        *("FP8AdamW", "FP8QuantizationConfig", "FP8Linear", "replace_linear_with_fp8", "restore_linear"),
        *("quantize", "dequantize", "sqnr_db"),
    },
    coat_flux: {"COATConfig", "COATTrainer", "apply_coat", "attach_lora"},
}

# Blocked packages raise on import, as on a machine without them; torch itself asks for triton and copes.
PROGRAM = """
import importlib.abc, sys
HEAVY = {heavy!r}

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError("blocked by the test: " + name, name=name)

sys.meta_path.insert(0, Block())
import coat_core, coat_flux
from coat_core import FP8AdamW, FP8Linear, quantize

sys.path.insert(0, {root!r})
import extensions.coat_flux as door

assert door.AI_TOOLKIT_EXTENSIONS == [], door.AI_TOOLKIT_EXTENSIONS
import torch

assert not torch.cuda.is_initialized(), "CUDA was initialized"
loaded = sorted(name for name in HEAVY if name in sys.modules)
assert not loaded, loaded
"""


def test_import_is_lean():
    """As pip's package, and as ai-toolkit's extension, which outside a running ai-toolkit offers nothing."""
    program = PROGRAM.format(heavy=HEAVY, root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", NAMES, ids=lambda package: package.__name__)
def test_public_names(package):
    assert NAMES[package] <= set(package.__all__) <= set(dir(package))
    assert len(set(package.__all__)) == len(package.__all__)
    assert {getattr(package, name).__name__ for name in NAMES[package]} == NAMES[package]
    undocumented = [name for name in package.__all__ if not (getattr(package, name).__doc__ or "").strip()]
    assert undocumented == []
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # noqa: B018
