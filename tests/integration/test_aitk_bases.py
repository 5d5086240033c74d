"""Every kind of base that ai-toolkit quantizes itself, below COAT's activations: next to the same base without COAT.

Small models of ai-toolkit's own classes, made and measured by tests/helpers/aitk_archs.py in its environment, each
qtype by itself: 10 s, but up to five minutes where ai-toolkit searches for a code book (orbitvq2 to orbitvq4). quanto's
qint4 is not among them: it multiplies on GPUs alone.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.architecture.sources import ROOT
from tests.tolerances import ARCH_FEWER_BYTES, ARCH_GRADIENT_COSINE, ARCH_LOWEST_COSINE

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(1800)]
QUANTO, TORCHAO = ("qfloat8", "qfloat8_e5m2", "qint8", "qint2"), ("float8", "int8")
UINT = tuple(f"uint{bits}" for bits in range(2, 8))
CONVROT = ("convrot8", "convrot4", "convrotbitnet", "convrotcomfyw4a4", *(f"convrotint{bits}" for bits in range(2, 9)))
ORBIT = ("orbit2", "orbit3", "orbit4", "orbitvq2", "orbitvq3", "orbitvq4")
QTYPES = (*QUANTO, *TORCHAO, *UINT, *CONVROT, "nvfp4", *ORBIT)
QTYPES_OF_OTHERS = ("qfloat8", "uint4")  # a base of 8 bits and one of 4
OTHERS = {"flux2_klein_4b": "fused", "chroma": "fused", "qwen_image": "fused", "sd3": "fused", "zimage": "fused"}


@functools.cache
def measured(arch: str, *qtypes: str) -> dict[str, dict[str, Any]]:
    """What the script found, by qtype."""
    command = [os.environ.get("AI_TOOLKIT_PYTHON", sys.executable), str(ROOT / "tests" / "helpers" / "aitk_archs.py")]
    command += [arch, *(f"--qtype={qtype}" for qtype in qtypes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {found["qtype"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("qtype", QTYPES)
def test_flux_is_fused_on_it(qtype: str) -> None:
    check(measured("flux", qtype)[qtype], "fused")


@pytest.mark.parametrize("qtype", QTYPES_OF_OTHERS)
@pytest.mark.parametrize("arch", OTHERS)
def test_others_train_on_it(arch: str, qtype: str) -> None:
    check(measured(arch, *QTYPES_OF_OTHERS)[qtype], OTHERS[arch])


def check(found: dict[str, Any], flow: str) -> None:
    assert "error" not in found, found["trace"]
    assert f"kept in FP8, {flow} flow" in found["kept"]["treatment"]
    for way in ("kept", "recomputed"):
        own, exact = found[way]["gradients"]
        assert own == exact > 0
        assert len(found[way]["bases"]) == 1
        assert found[way]["cosine"] >= ARCH_GRADIENT_COSINE, found[way]
        assert found[way]["lowest"] >= ARCH_LOWEST_COSINE["transformer"], found[way]
    assert found["bf16_bytes"] / found["kept_bytes"] >= ARCH_FEWER_BYTES["transformer"]
