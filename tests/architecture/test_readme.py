"""The READMEs show the option table as the code has it, and name only files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coat_flux.config.coat import OPTIONS, markdown_table

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README_zh.md")


def test_the_english_readme_holds_the_option_table_verbatim():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = text.index("<!-- options:start -->\n"), text.index("<!-- options:end -->")
    assert text[start:end].removeprefix("<!-- options:start -->\n") == markdown_table()


@pytest.mark.parametrize("readme", READMES)
def test_every_option_is_named(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    missing = [option.key for option in OPTIONS if f"`{option.key}`" not in text]
    assert missing == []


@pytest.mark.parametrize("readme", READMES)
def test_every_file_named_exists(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([\w./-]+)\)", text)) | set(re.findall(r"`(configs/[\w.]+|scripts/[\w.]+)`", text))
    assert len(named) > 5
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert missing == []
