"""One entry of `config.process` as the rules of both trainers see it, and the checks of single names and paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .ai_toolkit_keys import Toolkit
from .coat import COATConfig
from .findings import Findings

STANDALONE, AI_TOOLKIT = "standalone", "ai-toolkit"
BOTH, ALONE, TOOLKIT = (STANDALONE, AI_TOOLKIT), (STANDALONE,), (AI_TOOLKIT,)  # for whom a rule holds
STANDALONE_ARCHS = ("flux", "flux2", "flux2_klein_4b", "flux2_klein_9b")  # that our own trainer trains
FLAGS = ("pixart_sigma", "auraflow", "lumina2", "vega", "ssd", "pixart")
_LEGACY = {"is_flux": "flux", "is_xl": "sdxl", "is_v2": "sd2", "is_v3": "sd3", **{f"is_{name}": name for name in FLAGS}}
MAX_NAME = 200  # bytes; file systems take 255, and "_000000500.safetensors" is added
_BAD_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\[\]]|^[. ]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)


def arch_of(model: Mapping[str, Any]) -> str:
    """The architecture that the block `model` of a job asks ai-toolkit for."""
    arch = str(model.get("arch") or "").split(":")[0]
    arch = arch or next((name for key, name in _LEGACY.items() if model.get(key) is True), "sd1")
    return "flux" if arch == "flex1" else arch


@dataclass(frozen=True)
class Entry:
    """A block of keys whose types were checked, with what the rules about it need.

    Args:
        trainer: who would run it: `STANDALONE` or `AI_TOOLKIT`.
        raw: the block, unparsed.
        path: its key.
        findings: what was found so far; receives more.
        name: `config.name`.
        coat: its `coat:` block; None for ai-toolkit's own process types inside ai-toolkit.
        toolkit: the ai-toolkit that would run it.
        num_processes: how many processes accelerate started.
        outer: the entry of `config.process` that a block of a list is in.
    """

    trainer: str
    raw: Mapping[str, Any]
    path: str
    findings: Findings
    name: str = ""
    coat: COATConfig | None = None
    toolkit: Toolkit | None = None
    num_processes: int = 1
    outer: Entry | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; the default where it is absent, null or refused."""
        value = self._written(key)
        return default if value is None or value is ... or not self.sound(key) else value

    def entries(self, key: str) -> list[Entry]:
        """The blocks of a list of blocks."""
        value = self.get(key)
        return [
            replace(self, raw=block, path=f"{self.path}.{key}[{i}]", outer=self)
            for i, block in enumerate(value if isinstance(value, list) else ())
            if isinstance(block, Mapping)
        ]

    def add(self, key: str, text: str, *, warn: bool = False, default: Any = ...) -> None:
        """A finding `<rule>; <remedy>` at a key, with what is written there, or the default that holds instead."""
        value = self._written(key)
        value = default if value is ... else value
        shown = () if value is ... else (value,)
        (self.findings.warn if warn else self.findings.add)(f"{self.path}.{key}", text, *shown)

    def rule(self, trainers: tuple[str, ...], key: str, wrong: Any, text: str, **how: Any) -> None:
        """A rule about a key that holds for `trainers`: if `wrong`, a finding; `how` as in `add`."""
        if wrong and self.trainer in trainers:
            self.add(key, text, **how)

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys was refused."""
        return self.findings.sound(*(f"{self.path}.{key}" for key in keys))

    def given(self, key: str) -> bool:
        """Whether the key is written."""
        return f"{self.path}.{key}" in self.findings.given

    @property
    def optimizer(self) -> str:
        """The optimizer's name as ai-toolkit compares it."""
        return self.get("train.optimizer", "adamw").lower()

    @property
    def qtype(self) -> str | None:
        """How the transformer is quantized."""
        return self.get("model.qtype", "qfloat8") if self.get("model.quantize") is True else None

    @property
    def is_flux(self) -> bool:
        """Whether FLUX.1 is loaded, which is all that the stand-alone trainer does."""
        if self.trainer == STANDALONE:
            return True
        entry = self.outer or self
        arch = entry.get("model.arch", "").split(":")[0]
        return arch in ("flux", "flex1") or (not arch and entry.get("model.is_flux") is True)

    def _written(self, key: str) -> Any:
        """What stands at a dotted key; ... where nothing does."""
        value: Any = self.raw
        for part in key.split("."):
            value = value.get(part, ...) if isinstance(value, Mapping) else ...
        return value


def check_places(entry: Entry) -> None:
    """Name and folder of a run, and that its samples and charts are not among its photos."""
    folder, findings = entry.get("training_folder"), entry.findings
    name, name_path = entry.name, "config.name"
    if entry.get("name") is not None:
        name, name_path = entry.get("name"), f"{entry.path}.name"
    if not name or _BAD_NAME.search(name):
        rule = "names the run's folder, so none of <>:\"/\\|?*[], no dot or space at its ends; write another"
        findings.add(name_path, rule, name)
    elif len(name.encode()) > MAX_NAME:
        findings.add(name_path, f"names the run's folder, so at most {MAX_NAME} bytes; shorten it", name)
    path = f"{entry.path}.training_folder"
    if check_folder(folder, path, findings) and findings.sound(name_path):
        run = Path(folder, name)
        if run.exists() and not run.is_dir():
            findings.add(name_path, f"{run} is a file, not a run's folder; write another, or move it away", name)
    if folder is not None and findings.sound(path):
        run = Path(folder, name).resolve()
        photos = [item.get("folder_path") or item.get("dataset_path") for item in entry.entries("datasets")]
        if inside := next((one for one in photos if one and (run / "x").is_relative_to(Path(one).resolve())), None):
            rule = f"is inside the data set {inside}, so samples and charts would be trained on as photos"
            findings.add(path, f"{rule}; write a folder outside", folder)
    check_folder(entry.get("log_dir"), f"{entry.path}.log_dir", findings)
    if place := entry.get("model.name_or_path"):
        check_path(place, f"{entry.path}.model.name_or_path", findings)


def check_folder(folder: str | None, path: str, findings: Findings) -> bool:
    """Check that a folder can be made at `folder`: nothing but folders may be in the way. True where it can."""
    if not folder or not check_path(folder, path, findings):
        return False
    try:
        place = Path(folder)
        there = next((part for part in (place, *place.parents) if part.exists() or part.is_symlink()), None)
        if there is None or there.is_dir():
            return True
        what = "a file" if there.exists() else "a link to nothing"
        findings.add(path, f"{there} is {what}, not a folder; write another, or move it away", folder)
    except OSError as error:
        findings.add(path, f"cannot be a folder: {error.strerror}; write another", folder)
    return False


def check_path(value: str, path: str, findings: Findings) -> bool:
    """Refuse what gets into a path by mistake: `~`, which is not replaced, blanks, escapes, quotes. True if sound."""
    rule = ""
    if value.startswith("~"):
        rule = "~ is not replaced by the home folder; write the whole path, or ${HOME}/…"
    elif re.match(r"\$\w|%\w+%", value):
        rule = "environment variables are replaced only as ${NAME}; write it so, or write the whole path"
    elif re.search(r"[\t\r\n]", value):
        rule = "holds a tab or line break, as \\t and \\n make in double quotes; use single quotes, or / in paths"
    elif value[:1] in ("'", '"'):
        rule = "has quotes within the quotes; remove one pair"
    elif value != value.strip() and not Path(value).exists():
        rule = "starts or ends with a blank, and there is no such file; remove the blank"
    if rule:
        findings.add(path, rule, value)
    return not rule
