"""`import coat_core` and `import coat_flux` need no heavy package and touch no GPU, under both names of the folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT

HEAVY = ("triton", "diffusers", "transformers", "peft", "accelerate")

# Blocked packages raise on import, as on a machine without them; torch itself asks for triton and copes.
PROGRAM = """
import importlib.abc, sys
HEAVY = {heavy!r}

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError("blocked by the test: " + name, name=name)

sys.meta_path.insert(0, Block())
{statement}
import torch
assert not torch.cuda.is_initialized(), "CUDA was initialized"
loaded = sorted(name for name in HEAVY if name in sys.modules)
assert not loaded, loaded
print("imported", sorted(name for name in sys.modules if name.split(".")[0] in ("coat_core", "coat_flux"))[0])
"""


@pytest.mark.parametrize(
    ("statement", "first"),
    [
        ("import coat_core", "coat_core"),
        ("import coat_flux", "coat_flux"),
        ("import coat_core, coat_flux", "coat_core"),
        ("import coat_core; from coat_core import FP8AdamW, FP8Linear, quantize", "coat_core"),
    ],
)
def test_import_is_lean(statement: str, first: str) -> None:
    result = _python(PROGRAM.format(heavy=HEAVY, statement=statement))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["imported", first]


def test_import_under_ai_toolkits_name_is_lean() -> None:
    """Outside a running ai-toolkit the folder offers it an empty list, and loads nothing."""
    statement = f"sys.path.insert(0, {str(ROOT)!r}); import extensions.coat_flux as door; " + (
        "assert door.AI_TOOLKIT_EXTENSIONS == [], door.AI_TOOLKIT_EXTENSIONS; import coat_core"
    )
    result = _python(PROGRAM.format(heavy=HEAVY, statement=statement))
    assert result.returncode == 0, result.stderr


def test_the_block_works() -> None:
    result = _python(PROGRAM.format(heavy=HEAVY, statement="import diffusers"))
    assert result.returncode != 0
    assert "blocked by the test: diffusers" in result.stderr


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
