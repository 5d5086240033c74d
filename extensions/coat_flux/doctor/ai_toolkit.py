"""ai-toolkit: its version, our extension in it, and the names we need, looked for in its source, which is not run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..trainers.ai_toolkit import host
from ..trainers.ai_toolkit.install import CHECKOUT_PARTS, EXTENSION, PACKAGE
from . import Line, absent, bad, good

SUBJECT = "ai-toolkit"
CURE = f"use ai-toolkit {host.TESTED_VERSION}, or a COAT-FLUX made for this one"
PROCESSES = (  # with the class ours derives from, and those it derives from
    "extensions_built_in.sd_trainer.DiffusionTrainer",
    "extensions_built_in.sd_trainer.SDTrainer",
    host.PROCESS_MODULE,
    "jobs.process.BaseTrainProcess",
    "jobs.process.BaseProcess",
)
QUANTIZER_NAMES = (
    *host.QUANTIZER_METHODS,
    "get_ostris_quantizer",
    "convert_linear_to_ostris",
)
LINEARS = r"LINEAR_MODULES = \[[^\]]*OstrisLinear"


def checkout(given: Path | None) -> Iterator[Line]:
    """What is true of the checkout given, else AI_TOOLKIT_ROOT's, else the current folder where it is one."""
    place = given or os.environ.get("AI_TOOLKIT_ROOT")
    root = Path(place or Path.cwd())
    missing = [part for part in CHECKOUT_PARTS if not (root / part).exists()]
    if missing and not place:
        yield absent(SUBJECT, "not here; `coat-flux train` does not need it (--ai-toolkit DIR checks one)")
        return
    if missing:
        text = f"{root} is not a checkout of it: no {', '.join(missing)}"
        yield bad(SUBJECT, text, "give the folder of run.py", stops=True)
        return
    match = re.search(r"VERSION\s*=\s*[\"']([^\"']+)", _source(root, "version"))
    version = match[1] if match else "of unknown version"
    if version.startswith(host.TESTED_SERIES):
        yield good(SUBJECT, f"{version} in {root}")
    else:
        remedy = f"{host.TESTED_VERSION} is; mind the contract below"
        yield bad(SUBJECT, f"{version} in {root} is not tested with COAT-FLUX", remedy)
    yield _extension(root)
    problems = missing_pieces(root)
    for problem in problems:
        yield bad("contract", problem, CURE, stops=True)
    if not problems:
        yield good("contract", "every name that COAT-FLUX needs of it is there")


def _extension(root: Path) -> Line:
    folder = root / EXTENSION
    command = f"coat-flux install {root}"
    if not folder.exists():
        return absent("extension", f"not in that checkout; `{command}` links it")
    if folder.resolve() == PACKAGE.resolve():
        return good("extension", f"{EXTENSION} leads to {PACKAGE}")
    text = f"{EXTENSION} is a copy, or leads to another COAT-FLUX than {PACKAGE}"
    return bad("extension", text, f"move it away, then `{command}`")


def missing_pieces(root: Path) -> list[str]:
    """What a run would miss, by a search in the source."""
    process = "\n".join(_source(root, module) for module in PROCESSES)
    quantizer = _source(root, host.QUANTIZER_MODULE)
    parameters = r"[^,)]*,\s*".join(host.OPTIMIZER_PARAMETERS)
    searches = [(f"DiffusionTrainer: {name}", rf"def {name}\(", process) for name in host.HOOKS]
    searches += [(f"{host.QUANTIZER_MODULE}: {name}", rf"def {name}\(", quantizer) for name in QUANTIZER_NAMES]
    searches += [
        (
            f"{host.OPTIMIZER_MODULE}: get_optimizer({', '.join(host.OPTIMIZER_PARAMETERS)})",
            rf"def get_optimizer\(\s*{parameters}",
            _source(root, host.OPTIMIZER_MODULE),
        ),
        (
            f"{host.PROCESS_MODULE}: the import of get_optimizer",
            r"from toolkit\.optimizer import .*\bget_optimizer",
            _source(root, host.PROCESS_MODULE),
        ),
    ]
    for module in host.LORA_MODULES:
        searches.append((f"{module}: OstrisLinear in LINEAR_MODULES", LINEARS, _source(root, module)))
    lora = _source(root, host.LORA_MODULES[0])
    searches += [(f"{host.LORA_MODULES[0]}: {part}", rf"\.{part}\b", lora) for part in host.LORA_PARTS]
    return [f"no {what}" for what, pattern, source in searches if not re.search(pattern, source)]


def _source(root: Path, module: str) -> str:
    file = root / (module.replace(".", "/") + ".py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""
