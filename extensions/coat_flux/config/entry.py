"""One entry of `config.process` as the rules of both trainers see it, with its effective `coat:` block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .ai_toolkit_keys import Toolkit
from .coat import COATConfig, check_combinations
from .findings import Findings
from .options import build

STANDALONE, AI_TOOLKIT = "standalone", "ai-toolkit"
STANDALONE_ARCHS = ("flux", "flux2", "flux2_klein_4b", "flux2_klein_9b")  # that our own trainer trains
FLAGS = ("pixart_sigma", "auraflow", "lumina2", "vega", "ssd", "pixart")
_LEGACY = {"is_flux": "flux", "is_xl": "sdxl", "is_v2": "sd2", "is_v3": "sd3", **{f"is_{name}": name for name in FLAGS}}
BOTH, ALONE, TOOLKIT = (STANDALONE, AI_TOOLKIT), (STANDALONE,), (AI_TOOLKIT,)  # for whom a rule holds


@dataclass(frozen=True)
class Entry:
    """A block of type-checked keys and its context; `coat` is None for ai-toolkit's process types inside ai-toolkit."""

    trainer: str
    raw: Mapping[str, Any]
    path: str
    findings: Findings
    name: str = ""
    coat: COATConfig | None = None
    toolkit: Toolkit = field(default_factory=Toolkit)
    num_processes: int = 1
    outer: Entry | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; the default if it is absent, null or refused."""
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

    def rule(
        self, trainers: tuple[str, ...], key: str, wrong: Any, text: str, *, warn: bool = False, default: Any = ...
    ) -> None:
        """Add a finding `<rule>; <remedy>` at the dotted `key` if `wrong` and the rule applies to this trainer."""
        if not wrong or self.trainer not in trainers:
            return
        value = self._written(key)
        value = default if value is ... else value
        shown = () if value is ... else (value,)
        (self.findings.warn if warn else self.findings.add)(f"{self.path}.{key}", text, *shown)

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys was refused."""
        return self.findings.sound(*(f"{self.path}.{key}" for key in keys))

    def given(self, key: str) -> bool:
        """Whether the key is present."""
        return f"{self.path}.{key}" in self.findings.given

    @property
    def enabled(self) -> bool:
        """Whether COAT is enabled."""
        return self.coat is not None and self.coat.enabled

    @property
    def full(self) -> bool:
        """Whether the transformer itself is trained."""
        return is_full(self.raw)

    @property
    def optimizer(self) -> str:
        """The optimizer's name, normalized as in ai-toolkit."""
        return self.get("train.optimizer", "adamw").lower()

    @property
    def qtype(self) -> str | None:
        """How the transformer is quantized."""
        return self.get("model.qtype", "qfloat8") if self.get("model.quantize") is True else None

    @property
    def is_flux(self) -> bool:
        """Whether FLUX.1 is loaded; the stand-alone trainer applies FLUX.1's rules to FLUX.2, too."""
        if self.trainer == STANDALONE:
            return True
        entry = self.outer or self
        arch = entry.get("model.arch", "").split(":")[0]
        return arch in ("flux", "flex1") or (not arch and entry.get("model.is_flux") is True)

    def _written(self, key: str) -> Any:
        value: Any = self.raw
        for part in key.split("."):
            value = value.get(part, ...) if isinstance(value, Mapping) else ...
        return value


def arch_of(model: Mapping[str, Any]) -> str:
    """The architecture that a `model` block selects in ai-toolkit."""
    arch = str(model.get("arch") or "").split(":")[0]
    arch = arch or next((name for key, name in _LEGACY.items() if model.get(key) is True), "sd1")
    return "flux" if arch == "flex1" else arch


def is_full(process: Mapping[str, Any]) -> bool:
    """Whether this entry of `config.process` trains the transformer itself."""
    adapter = process.get("adapter")
    trains_adapter = isinstance(adapter, Mapping) and bool(adapter.get("train"))
    return not (trains_adapter or any(map(process.get, ("network", "embedding", "decorator"))))


def coat_of_entry(process: Mapping[str, Any], file: str) -> COATConfig:
    """The `coat:` block of a process entry as it applies inside ai-toolkit; raises ConfigError."""
    path, findings = "config.process[0].coat", Findings(file)
    coat = build(COATConfig, process.get("coat"), path, findings)
    check_combinations(coat, path, findings)
    findings.raise_if_any()
    return coat_of_full(coat, path, findings.given) if is_full(process) else coat


def coat_of_full(coat: COATConfig, path: str, given: Collection[str]) -> COATConfig:
    """The block as it applies to full fine-tuning; `given` holds the keys present in the job.

    Trained weights change in every step, so blocks take the generic flow and run eager, and INT8 falls back to bf16.
    bf16 weights are rounded stochastically by default, since most updates are smaller than half a bf16 step.
    """
    optimizer = coat.optimizer
    if f"{path}.optimizer.stochastic_rounding" not in given:
        optimizer = replace(optimizer, stochastic_rounding=True)
    return replace(
        coat,
        optimizer=optimizer,
        activation=replace(coat.activation, flow="generic"),
        speed=replace(coat.speed, cuda_graphs="never", measure="never"),
        fallback="error" if coat.fallback == "error" else "bf16",
    )
