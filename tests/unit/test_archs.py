"""Which `model.arch` COAT trains, and what `check` says of the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coat_flux.blocks.models import ARCHS, REFUSED
from coat_flux.blocks.models.check import archs_of, check_arch, check_models
from coat_flux.config.findings import Findings

NO_MODELS = {"example", "sapiens2_1b"}  # ai-toolkit's template of a model, and a feature extractor
LEGACY = {"flux", "sd1", "sd2", "sd3", "sdxl", "ssd", "vega", "pixart", "pixart_sigma", "auraflow", "lumina2"}


def checkout(root: Path) -> Path:
    built_in = root / "extensions_built_in" / "new"
    built_in.mkdir(parents=True)
    (built_in / "model.py").write_text("class New(BaseModel):\n    arch = 'new_model'\n    # arch = 'old'\n")
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.py").write_text('class Mine(Base):\n    arch: str = "mine"\n\narch = "outside"\n')
    (root / "extensions").mkdir()
    (root / "extensions" / "mine").symlink_to(elsewhere, target_is_directory=True)
    return root


def test_archs_are_read_from_source_and_through_links(tmp_path: Path) -> None:
    assert set(archs_of(checkout(tmp_path))) == {"new_model", "mine"}


@pytest.mark.parametrize(
    ("arch", "checked_out", "severity", "words"),
    [
        *((arch, False, "error", f"{REFUSED[arch]}; write coat: {{enabled: false}}") for arch in REFUSED),
        ("flux", True, None, ""),
        ("new_model", True, "warning", "cautiously"),
        ("unheard", False, "warning", "cautiously"),  # without a checkout nobody can know
        ("flux_kontex", True, "error", "did you mean 'flux_kontext'?"),
        ("unheard", True, "error", "docs/models.md"),
    ],
)
def test_an_arch_is_trained_refused_or_treated_cautiously(tmp_path, arch, checked_out, severity, words):
    findings = Findings("f.yaml")
    check_arch(arch, set(archs_of(checkout(tmp_path))) if checked_out else set(), "model.arch", findings)
    assert [item.severity for item in findings.all] == ([severity] if severity else [])
    assert all(words in item.text for item in findings.all)


@pytest.mark.parametrize(
    ("kind", "coat", "trainer", "refused"),
    [
        ("coat_flux_trainer", None, "ai-toolkit", True),
        ("coat_flux_trainer", {"enabled": False}, "ai-toolkit", False),
        ("coat_flux_trainer", None, "standalone", False),  # the rules of its own keys refuse it
        ("sd_trainer", None, "ai-toolkit", False),
    ],
)
def test_an_arch_is_refused_where_coat_would_train_it(kind: str, coat: object, trainer: str, refused: bool) -> None:
    process = {"type": kind, "coat": coat, "model": {"name_or_path": "x", "arch": "hidream"}}
    raw = {"config": {"process": [process]}}
    keys = [item.key for item in check_models(raw, trainer=trainer, elsewhere=True)]
    assert keys == ["config.process[0].model.arch"] * refused


@pytest.mark.aitk
def test_the_families_have_every_arch_of_the_pinned_ai_toolkit() -> None:
    assert set(archs_of(Path(os.environ["AI_TOOLKIT_ROOT"]))) - NO_MODELS | LEGACY == ARCHS.keys() | REFUSED.keys()
    assert not ARCHS.keys() & REFUSED.keys()
