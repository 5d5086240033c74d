"""One entry of `config.process` as ai-toolkit's rules look at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .ai_toolkit_keys import Schema
from .coat import COATConfig
from .findings import Findings

HOST_QTYPE = "qfloat8"


@dataclass(frozen=True)
class Entry:
    """One entry of `config.process`.

    Args:
        process: as read.
        name: `config.name`.
        path: its key.
        coat: its `coat:` block; None for ai-toolkit's own process types.
        findings: receives what is found.
        schema: what this ai-toolkit reads.
        num_processes: how many processes accelerate started.
    """

    process: Mapping[str, Any]
    name: str
    path: str
    coat: COATConfig | None
    findings: Findings
    schema: Schema
    num_processes: int = 1

    def block(self, name: str) -> Mapping[str, Any]:
        """A block of it; empty where there is none, or no block."""
        value = self.process.get(name)
        return value if isinstance(value, Mapping) else {}

    def text(self, block: str, key: str, default: str) -> str:
        """A text in a block; the default where it is none, which is another finding."""
        value = self.block(block).get(key, default)
        return value if isinstance(value, str) else default

    def entries(self, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(key, block) of each entry of a list of blocks; `name` may be dotted once."""
        *outer, leaf = name.split(".")
        value = (self.block(outer[0]) if outer else self.process).get(leaf)
        for i, entry in enumerate(value) if isinstance(value, list) else ():
            if isinstance(entry, Mapping):
                yield f"{self.path}.{name}[{i}]", entry

    def add(self, key: str, text: str, value: Any) -> None:
        """An error at a key of the entry."""
        self.findings.add(f"{self.path}.{key}", text, value)

    def warn(self, key: str, text: str, value: Any) -> None:
        """A warning at a key of the entry."""
        self.findings.warn(f"{self.path}.{key}", text, value)

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys of the entry was refused."""
        return self.findings.sound(*(f"{self.path}.{key}" for key in keys))

    @property
    def optimizer(self) -> str:
        """The optimizer's name as the host compares it."""
        return self.text("train", "optimizer", "adamw").lower()

    @property
    def qtype(self) -> str | None:
        """How the host quantizes the transformer."""
        return self.text("model", "qtype", HOST_QTYPE) if self.block("model").get("quantize") is True else None

    @property
    def is_flux(self) -> bool:
        """Whether the host loads FLUX.1."""
        arch = self.text("model", "arch", "").split(":")[0]
        return arch in ("flux", "flex1") or (not arch and self.block("model").get("is_flux") is True)
