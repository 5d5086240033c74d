"""What the Colab notebook runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_notebook_installs_here_and_names_files_that_exist() -> None:
    content = json.loads((ROOT / "notebooks" / "quickstart_colab.ipynb").read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    compile("\n".join(line for line in lines if not line.startswith(("!", "%"))), "notebook", "exec")
    assert "%env COAT_NO_VENV=1" in lines
    quickstart = (ROOT / "scripts" / "quickstart.py").read_text(encoding="utf-8")
    for name in ("coat_quickstart", "without_and_with_lora.png"):
        assert name in quickstart
        assert name in "".join(lines)
    commands = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "python scripts/quickstart.py" in commands
    named = re.findall(r"(?:scripts|configs)/[\w.]+", "\n".join(commands))
    assert [name for name in named if not (ROOT / name).exists()] == []
