"""Every `arch` of the pinned ai-toolkit is refused or trained as the table says, and FLUX on bases that it quantizes.

Small models, measured by tests/helpers/aitk_archs.py in ai-toolkit's environment. A qtype takes 10 s, but up to five
minutes where it searches for a code book (orbitvq2). quanto's qint4 is not among them: it multiplies on GPUs alone.
"""

import functools
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
from tests.unit.test_check_model import LEGACY, NEWER, NO_MODELS

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]
FUSED = {
    "FluxTransformer2DModel", "Flux2", "Flux2Transformer2DModel", "Chroma", "ChromaTransformer2DModel",
    "QwenImageTransformer2DModel", "ZImageTransformer2DModel", "SD3Transformer2DModel", "Krea2Transformer2DModel",
    "SingleStreamDiT",
}  # fmt: skip
MODEL_OF_TWO_PARTS = {"wan22_14b", "wan22_14b_i2v"}  # the noise level chooses one
HOST = Path(os.environ.get("AI_TOOLKIT_ROOT", "."))
ALL = sorted(set(archs_of(HOST)) - NO_MODELS | LEGACY) if "AI_TOOLKIT_ROOT" in os.environ else []
QUANTO, TORCHAO, UINT = ("qfloat8", "qint8", "qint2"), ("float8", "int8"), ("uint2", "uint4", "uint7")
CONVROT = ("convrot8", "convrot4", "convrotbitnet", "convrotcomfyw4a4", "convrotint2", "convrotint8")
QTYPES = (*QUANTO, *TORCHAO, *UINT, *CONVROT, "nvfp4", "orbit2", "orbit4", "orbitvq2")
QTYPES_OF_OTHERS = ("qfloat8", "uint4")  # a base of 8 bits and one of 4
OTHERS = ("flux2_klein_4b", "chroma", "qwen_image", "sd3", "zimage")


@functools.cache
def measured(*arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    command = [os.environ.get("AI_TOOLKIT_PYTHON", sys.executable), str(ROOT / "tests" / "helpers" / "aitk_archs.py")]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["arch"], row["qtype"]): row for row in rows}


@pytest.fixture(scope="module")
def archs(request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params["arch"] for item in items if "qtype" not in item.callspec.params}
    return measured(*sorted(names - REFUSED.keys()))


def check(row: dict[str, Any], kind: str = "transformer") -> None:
    assert "error" not in row, row["trace"]
    for way in ("kept", "recomputed"):
        own, exact = row[way]["gradients"]
        assert own == exact > 0
        assert row[way]["cosine"] >= ARCH_GRADIENT_COSINE, row[way]
        assert row[way]["lowest"] >= ARCH_LOWEST_COSINE[kind], row[way]
    assert row["bf16_bytes"] / row["kept_bytes"] >= ARCH_FEWER_BYTES[kind]


def test_every_arch_is_in_the_table_and_every_class_has_its_block_lists():
    assert set(ALL) == ARCHS.keys() | REFUSED.keys() - NEWER
    assert {name for name, entry in FAMILIES.items() if any(x.block in READ_BLOCKS for x in entry.lists)} == FUSED


@pytest.mark.parametrize("arch", ALL)
def test_each_is_refused_or_trained_as_the_table_says(arch, request):
    if arch in REFUSED:
        findings = Findings("f.yaml")
        check_arch(arch, ALL, "model.arch", findings)
        assert len(findings.errors) == 1
        return
    row = request.getfixturevalue("archs")[arch, ""]
    check(row, "UNet" if "UNet" in ARCHS[arch].transformer else "transformer")
    assert row["class"] == ARCHS[arch].transformer
    idle = 2 if arch in MODEL_OF_TWO_PARTS else 0
    ran, rest = row["blocks"] - idle, f"; {idle} untouched, not called" if idle else ""
    flow = "fused" if row["class"] in FUSED else "generic"
    assert row["kept"]["treatment"] == f"{ran} kept in FP8, {flow} flow, attention fp8{rest}"
    assert row["recomputed"]["treatment"] == f"{ran} recomputed{rest}"


@pytest.mark.parametrize(
    ("arch", "qtype"),
    [*(("flux", qtype) for qtype in QTYPES), *((arch, qtype) for arch in OTHERS for qtype in QTYPES_OF_OTHERS)],
)
def test_blocks_are_fused_on_ai_toolkits_own_bases(arch, qtype):
    row = measured(arch, f"--qtype={qtype}")[arch, qtype]
    check(row)
    assert "kept in FP8, fused flow" in row["kept"]["treatment"]
    assert len(row["kept"]["bases"]) == len(row["recomputed"]["bases"]) == 1
