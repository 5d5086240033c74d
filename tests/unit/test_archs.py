"""Which `model.arch` COAT trains, and what `check` says of the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coat_flux.config.archs import REFUSED, TRANSFORMERS, archs_of, refusal

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


@pytest.mark.parametrize("arch", sorted(REFUSED))
def test_what_coat_does_not_train_is_refused_with_what_works(arch: str) -> None:
    text, warns = refusal(arch, frozenset())
    assert not warns
    assert text.startswith(REFUSED[arch])
    assert "; write coat: {enabled: false}, or train one of " in text
    assert text.endswith("wan21, wan22_14b, wan22_5b, zeta_chroma, zimage")
    assert "qwen_image, " in text
    assert "qwen_image_edit" not in text


def test_a_new_arch_is_treated_cautiously_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    host = frozenset(archs_of(checkout(tmp_path)))
    assert refusal("flux", host) == ("", False)
    text, warns = refusal("new_model", host)
    assert warns
    assert "the table after the first step" in text
    assert refusal("unheard", frozenset())[1]  # without a checkout nobody can know
    text, warns = refusal("flux_kontex", host)
    assert not warns
    assert text.endswith("which would load Stable Diffusion 1; did you mean 'flux_kontext'?")


@pytest.mark.aitk
def test_the_table_has_every_arch_of_the_pinned_ai_toolkit() -> None:
    found = set(archs_of(Path(os.environ["AI_TOOLKIT_ROOT"])))
    assert found - NO_MODELS | LEGACY == TRANSFORMERS.keys() | REFUSED.keys()
    assert not TRANSFORMERS.keys() & REFUSED.keys()
