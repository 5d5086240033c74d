"""Commands of the READMEs and of docs/ work as written, where the examples of a wheel are, with the tiny config.

`scripts/test_versions.py` runs this file in new environments, too, made as the READMEs say.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coat_flux.cli.entry import main, make_parser
from tests.helpers.aitk_standin.host import copy_checkout

ROOT = Path(__file__).parents[2]
ENGLISH = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "coat_core", "extensions", "configs", "datasets_example")
TINY = "configs/flux_clothing_tiny.yaml"
IN_PLACE_OF = {  # what stands in the documentation for something of the user's, or needs a GPU
    "path/to/photos": "datasets_example/clothing",
    "photos.yaml": "clothing.yaml",  # as `new` names it after the folder
    "output/photos": "output/flux_clothing_tiny",
    "path/to/ai-toolkit": "ai-toolkit",
    "flux_clothing_coat": "flux_clothing_tiny",
}
SAYS = {  # command: how its output shows that it did its work
    "coat-flux doctor": "✓ torch",
    "coat-flux new path/to/photos --gpu cpu": "wrote clothing.yaml",
    "coat-flux data photos.yaml": "contact sheet: ",
    "coat-flux check photos.yaml": "; 'clothing' would train 250 steps into output/clothing",
    "coat-flux plan photos.yaml": "CPU memory",
    "coat-flux report output/photos": "wrote output/flux_clothing_tiny/coat/report.html",
    "coat-flux plan configs/flux_clothing_coat.yaml --gpu 16": "16",
    "coat-flux export output/flux_clothing_coat/flux_clothing_coat.safetensors --to kohya": "kohya",
    "coat-flux install path/to/ai-toolkit": "extensions/coat_flux: link made",
    "coat-flux report output/flux_clothing_coat": "report",
    "coat-flux report output/flux_clothing_coat --out page.html": "page.html",
}


def commands(*pages: Path) -> list[str]:
    """The commands in the pages' shell blocks, without their comments."""
    blocks = [block for page in pages for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
    lines = "\n".join(blocks).splitlines()
    return [command for line in lines if (command := re.split(r"(?:^|\s)#\s", line)[0].strip())]


def _run(command: list[str], cwd: Path, **environment: str) -> str:
    whole = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel, built from a copy of the sources, as pip would unpack it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / "src" / name, ignore=shutil.ignore_patterns("__pycache__", "_*cache"))
        else:
            (folder / "src").mkdir(exist_ok=True)
            shutil.copy(source, folder / "src" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "."]
    _run([*build, "./src"], folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site-packages")
    return folder / "site-packages"


USES = """
import re, sys
from pathlib import Path
from coat_flux.cli.entry import main

tiny = Path(sys.argv[1])
assert main(["examples"]) == 0
short, count = re.subn(r"(?m)^( +)steps: \\d+", r"\\1disable_sampling: true\\n\\1steps: 1", tiny.read_text("utf-8"))
assert count == 1
tiny.write_text(short.replace("batch_size: 4", "batch_size: 1"), "utf-8")
assert main(["examples"]) == 0
"""


@pytest.fixture(scope="module")
def workplace(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs and photos from the wheel, one step trained with them, and an ai-toolkit."""
    folder = tmp_path_factory.mktemp("work")
    printed = _run([sys.executable, "-c", USES, TINY], folder, PYTHONPATH=str(installed))
    assert "datasets_example: 33 files copied" in printed
    assert "flux_clothing_tiny.yaml: left as it is, it differs from" in printed
    assert "datasets_example: 0 files copied" in printed
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", TINY]) == 0
    lora = folder / "output" / "flux_clothing_tiny" / "flux_clothing_tiny.safetensors"
    assert lora.stat().st_size > 10_000
    copy_checkout(folder / "ai-toolkit")
    return folder


def _files(folder: Path, pattern: str = "*.*") -> dict[str, bytes]:
    files = [path for path in folder.rglob(pattern) if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_wheel_holds_the_code_configs_photos_and_the_mini_flux(installed):
    package = installed / "coat_flux"
    assert _files(installed / "coat_core", "*.py") == _files(ROOT / "coat_core", "*.py")
    assert _files(package, "*.py") == _files(ROOT / "extensions" / "coat_flux", "*.py")
    assert _files(package / "configs") == _files(ROOT / "configs")
    photos = _files(package / "datasets_example")
    assert len(photos) == 33
    assert photos.items() <= _files(ROOT / "datasets_example").items()
    for folder, least in (("mini_flux/files", 10), ("pages", 2), ("config", 1)):
        assert len([name for name in _files(package / folder) if not name.endswith(".py")]) >= least
        assert _files(package / folder) == _files(ROOT / "extensions" / "coat_flux" / folder)


def _figures(page: Path) -> set[str]:
    return set(re.findall(r"(\d+\.\d+) GB", page.read_text("utf-8")))


def test_the_chinese_pages_have_the_same_commands_and_figures():
    pairs = [(ROOT / "README.md", ROOT / "README_zh.md")]
    pairs += [(ROOT / "docs" / page.name, page) for page in (ROOT / "docs" / "zh").glob("*.md")]
    assert len(pairs) > 3
    for english, chinese in pairs:
        assert commands(english) == commands(chinese), english
        assert _figures(english) <= _figures(chinese), english


@pytest.mark.parametrize("command", SAYS)
def test_commands_work(command, workplace, monkeypatch, capsys):
    """The others train for long, on a GPU or on photos of the user's; below they are parsed."""
    assert command in commands(*ENGLISH)
    monkeypatch.chdir(workplace)
    program, *arguments = shlex.split(command)
    assert program == "coat-flux"
    if arguments[:2] != ["plan", "configs/flux_clothing_coat.yaml"]:
        for written, meant in IN_PLACE_OF.items():
            arguments = [argument.replace(written, meant) for argument in arguments]
    assert main(arguments) == 0
    assert SAYS[command] in capsys.readouterr().out


def test_commands_have_their_options():
    ours = [command for command in commands(*ENGLISH) if command.startswith("coat-flux ")]
    assert len(ours) > 15
    for command in ours:
        assert callable(make_parser().parse_args(shlex.split(command)[1:]).run), command
