"""Extensions: every folder is imported, and asked for its process class, for every job."""

import importlib
import pkgutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Extension:
    uid = None
    name = None

    @classmethod
    def get_process(cls):
        raise NotImplementedError


def process_classes():
    """Type name -> process class of all extensions, then the built-in types."""
    found = {}
    for _, name, _ in pkgutil.iter_modules([str(ROOT / "extensions")]):
        module = importlib.import_module(f"extensions.{name}")
        for extension in getattr(module, "AI_TOOLKIT_EXTENSIONS", []):
            found[extension.uid] = extension.get_process()
    importlib.import_module("extensions_built_in.captioner")
    from extensions_built_in.sd_trainer.DiffusionTrainer import DiffusionTrainer
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer

    return {**found, "sd_trainer": SDTrainer, "diffusion_trainer": DiffusionTrainer}
