"""Every `arch` of the pinned ai-toolkit: refused before anything is loaded, or trained as the table says.

Small models of ai-toolkit's own classes, made and measured by tests/helpers/aitk_archs.py in its environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coat_flux.blocks.models import ARCHS, FAMILIES, READ_BLOCKS, REFUSED
from coat_flux.blocks.models.check import archs_of, check_arch
from coat_flux.config.findings import Findings
from tests.architecture.sources import ROOT
from tests.tolerances import ARCH_FEWER_BYTES, ARCH_GRADIENT_COSINE, ARCH_LOWEST_COSINE
from tests.unit.test_archs import LEGACY, NO_MODELS

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]
FUSED = {
    "FluxTransformer2DModel",
    "Flux2",
    "Flux2Transformer2DModel",
    "Chroma",
    "ChromaTransformer2DModel",
    "QwenImageTransformer2DModel",
    "ZImageTransformer2DModel",
    "SD3Transformer2DModel",
}
MODEL_OF_TWO_PARTS = {"wan22_14b", "wan22_14b_i2v"}  # the noise level chooses one
HOST = Path(os.environ.get("AI_TOOLKIT_ROOT", "."))
ALL = sorted(set(archs_of(HOST)) - NO_MODELS | LEGACY) if "AI_TOOLKIT_ROOT" in os.environ else []


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What the script found, by arch: of those whose tests are to run."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    archs = {item.callspec.params["arch"] for item in items} - REFUSED.keys()
    command = [os.environ.get("AI_TOOLKIT_PYTHON", sys.executable), str(ROOT / "tests" / "helpers" / "aitk_archs.py")]
    done = subprocess.run(
        [*command, *sorted(archs)], cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {found["arch"]: found for found in map(json.loads, done.stdout.splitlines())}


def kind_of(arch: str) -> str:
    return "UNet" if "UNet" in ARCHS[arch].transformer else "transformer"


def test_every_arch_is_in_the_table_and_every_class_has_its_block_lists() -> None:
    assert set(ALL) == ARCHS.keys() | REFUSED.keys()
    assert {name for name, entry in FAMILIES.items() if any(x.block in READ_BLOCKS for x in entry.lists)} == FUSED


@pytest.mark.parametrize("arch", ALL)
def test_each_is_refused_or_trained_as_the_table_says(arch: str, request: pytest.FixtureRequest) -> None:
    if arch in REFUSED:
        findings = Findings("f.yaml")
        check_arch(arch, ALL, "model.arch", findings)
        assert len(findings.errors) == 1
        return
    found = request.getfixturevalue("measured")[arch]
    assert "error" not in found, found["trace"]
    assert found["class"] == ARCHS[arch].transformer
    idle = 2 if arch in MODEL_OF_TWO_PARTS else 0
    ran, rest = found["blocks"] - idle, f"; {idle} untouched, not called" if idle else ""
    flow = "fused" if found["class"] in FUSED else "generic"
    assert found["kept"]["treatment"] == f"{ran} kept in FP8, {flow} flow, attention fp8{rest}"
    assert found["recomputed"]["treatment"] == f"{ran} recomputed{rest}"
    for way in ("kept", "recomputed"):
        own, exact = found[way]["gradients"]
        assert own == exact > 0
        assert found[way]["cosine"] >= ARCH_GRADIENT_COSINE, found[way]
        assert found[way]["lowest"] >= ARCH_LOWEST_COSINE[kind_of(arch)], found[way]
    assert found["bf16_bytes"] / found["kept_bytes"] >= ARCH_FEWER_BYTES[kind_of(arch)]
