"""The names that users import are there, and what a package exports exists."""

from __future__ import annotations

import pytest

import coat_core
import coat_flux

CORE_NAMES = [
    "FP8AdamW",
    "FP8QuantizationConfig",
    "FP8Linear",
    "replace_linear_with_fp8",
    "restore_linear",
    "quantize",
    "dequantize",
    "sqnr_db",
]
FLUX_NAMES = ["COATConfig", "COATTrainer", "apply_coat", "attach_lora"]


@pytest.mark.parametrize("name", CORE_NAMES)
def test_core_names(name: str) -> None:
    assert name in coat_core.__all__
    assert callable(getattr(coat_core, name))
    assert getattr(coat_core, name).__name__ == name


@pytest.mark.parametrize("name", FLUX_NAMES)
def test_flux_names(name: str) -> None:
    assert name in coat_flux.__all__
    assert callable(getattr(coat_flux, name))
    assert getattr(coat_flux, name).__name__ == name


@pytest.mark.parametrize("package", [coat_core, coat_flux], ids=lambda package: package.__name__)
def test_everything_exported_exists_and_is_documented(package) -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    undocumented = [name for name in package.__all__ if not (getattr(package, name).__doc__ or "").strip()]
    assert undocumented == []
    assert set(package.__all__) <= set(dir(package))


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        coat_flux.nonsense  # noqa: B018
