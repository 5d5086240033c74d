"""Pages and configs: the option table is the code's, files named exist, configs name every option."""

import pkgutil
import re
from pathlib import Path

import pytest

from coat_flux.config.coat import BY_KEY, OPTIONS, COATConfig
from coat_flux.config.findings import show
from coat_flux.config.job import JobConfig
from tests.architecture.test_layers import ORDER

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README_zh.md")
CONFIGS = ROOT / "configs"
PAGES = [*READMES, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]


def markdown_table() -> str:
    """The table of the `coat:` block: key, values with the default first, effect."""
    lines = ["| key | values (default first) | effect |", "|---|---|---|"]
    for option in OPTIONS:
        if option.kind == "bool":
            values = "true, false" if option.default else "false, true"
        elif option.choices:
            values = ", ".join(map(str, option.choices))
        else:
            default = show(list(option.default) if isinstance(option.default, tuple) else option.default)
            values = f"{default}; {option.rule().removeprefix('must be ').removesuffix(', or null')}"
        lines.append(f"| `{option.key}` | {values} | {option.doc} |")
    return "\n".join(lines) + "\n"


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_english_page_holds_the_option_table_verbatim():
    text = _text("docs/options.md")
    start, end = text.index("<!-- options:start -->\n"), text.index("<!-- options:end -->")
    assert text[start:end].removeprefix("<!-- options:start -->\n") == markdown_table()


def test_every_option_is_named_in_chinese():
    text = _text("docs/zh/options.md")
    assert [option.key for option in OPTIONS if f"`{option.key}`" not in text] == []


@pytest.mark.parametrize("page", [page for page in PAGES if "zh" in page])
def test_chinese_has_one_word_for_a_thing(page):
    """块 of the model, 段 of the YAML, 位 of a format, 重计算, 内存."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", _text(page), flags=re.DOTALL)
    assert re.findall(r".{0,5}(?:\bblocks?\b|比特|重算|主机内存|mini-FLUX|` 块|配置块).{0,5}", prose) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_exists(page):
    text = _text(page)
    linked = set(re.findall(r"\]\(([\w./-]+)(?:#[^)]*)?\)", text))
    named = set(re.findall(r"`((?:configs|scripts)/[\w.]+)`", text))
    missing = [name for name in linked if not (ROOT / page).parent.joinpath(name).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert sorted(missing) == []
    assert page not in READMES or len(linked | named) > 5


@pytest.mark.parametrize("page", [*PAGES, *(f"configs/{path.name}" for path in sorted(CONFIGS.glob("*.yaml")))])
def test_every_name_of_ours_on_a_page_exists(page):
    text = _text(page)
    for name in set(re.findall(r"\bcoat_(?:core|flux)(?:\.[A-Za-z_]+)+", text)):
        pkgutil.resolve_name(name)


def test_the_map_has_a_line_for_every_package_in_their_order():
    packages = [unit.removeprefix("coat_flux.") for unit in ORDER if unit.startswith("coat_flux.")]
    assert re.findall(r"^\| `(\w+)/` \|", _text("extensions/coat_flux/README.md"), re.MULTILINE) == packages


def test_every_file_of_the_maps_exists():
    for folder in ("extensions/coat_flux", "coat_core"):
        named = set(re.findall(r"`([\w/]+\.(?:py|md))`", _text(f"{folder}/README.md")))
        bases = [ROOT, ROOT / folder, ROOT / folder / "ops"]
        assert len(named) > 10
        assert sorted(name for name in named if not any((base / name).exists() for base in bases)) == []


@pytest.mark.parametrize("name", ["flux_clothing_coat.yaml", "flux_clothing_tiny.yaml"])
def test_config_names_every_option(name):
    """They say "every option stands here": so does the one that applies to another `checkpointing`, as a comment."""
    text = (CONFIGS / name).read_text(encoding="utf-8")
    block = text[text.index("      coat:") :]
    missing = [key for key in BY_KEY if not re.search(rf"^ +(# )?{key.split('.')[-1]}:", block, re.MULTILINE)]
    assert missing == []


def test_defaults_in_the_first_config_are_the_defaults():
    assert JobConfig.load(CONFIGS / "flux_clothing_coat.yaml").coat == COATConfig()
