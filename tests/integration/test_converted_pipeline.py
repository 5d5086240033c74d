"""docs/diffusers.md: each line of its tables on a small real FluxPipeline, converted and not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.configuration_utils import register_to_config
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from coat_core import sqnr_db
from coat_flux import COATConfig, apply_coat
from coat_flux.config.job_sections import NetworkSection
from coat_flux.trainers.standalone.network import add_lora
from tests.helpers.flux import flux_inputs, tiny_flux
from tests.helpers.tiny_flux import TINY_TRANSFORMER_CONFIG, make_tiny_flux
from tests.tolerances import PIPELINE_FLOOR_DB

PAGE = (Path(__file__).parents[2] / "docs/diffusers.md").read_text(encoding="utf-8")
ADAPTED, BARE = (
    re.findall(r"^\| `(.+?)` \| (works|refused|differs) \|", part, re.MULTILINE) for part in PAGE.split("\n## ")[1:]
)
TO_THE_BIT = ("pipe.unload_lora_weights()", "with allow_merging(transformer): pipe.fuse_lora(); pipe.unfuse_lora()")
IMPORTS = """
import copy, torch
from coat_core import allow_merging, restore_linear
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from peft import get_peft_model
from safetensors.torch import load_file, save_file
"""


class ConvertsInInit(FluxTransformer2DModel):
    converts = True

    @register_to_config
    def __init__(self, in_channels: int = 64, guidance_embeds: bool = True) -> None:
        super().__init__(**TINY_TRANSFORMER_CONFIG)
        if self.converts:
            apply_coat(self, COATConfig())


def lora_file(path: Path, seed: int) -> Path:
    draw = torch.Generator().manual_seed(seed)
    matrices = add_lora(tiny_flux(), NetworkSection(linear=4), seed).items()
    save_file({name: torch.randn(x.shape, generator=draw) * 0.12 for name, x in matrices}, path)
    return path


def make(root: Path, converted: bool) -> dict[str, Any]:
    """The names that lines use."""
    pipe = FluxPipeline.from_pretrained(make_tiny_flux(root / "model"), torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    if converted:
        apply_coat(pipe.transformer, COATConfig.from_dict({"memory": {"checkpointing": "none"}}))
    own = root / str(converted)
    own.mkdir()
    names = {"pipe": pipe, "transformer": pipe.transformer, "unconverted": tiny_flux(), "inputs": flux_inputs()}
    names |= {"a": lora_file(own / "a.safetensors", 1), "b": lora_file(own / "b.safetensors", 2)}
    names |= {"folder": root / "model/transformer", "empty": own / "empty", "file": own / "file"}
    names |= {"lora": LoraConfig(target_modules=["to_q"]), "cpu": torch.device("cpu")}
    names["pissa"] = LoraConfig(r=4, target_modules=r".*blocks.*(to_q|to_k)", init_lora_weights="pissa")
    names["ConvertsInInit"] = type("Mine", (ConvertsInInit,), {"converts": converted})
    exec(IMPORTS, names)
    return names


def run(line: str, names: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    if "parameters()" not in line and "footprint" not in line:
        return exec(line, names)
    return eval(line, names)


def picture(names: dict[str, Any]) -> Tensor:
    sizes = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 32}
    draw = torch.Generator().manual_seed(0)
    return torch.from_numpy(names["pipe"]("a cat", generator=draw, output_type="np", **sizes).images)


@pytest.mark.parametrize(
    ("adapted", "line", "word"), [*((True, *row) for row in ADAPTED), *((False, *row) for row in BARE)]
)
def test_a_line_does_what_its_word_says(adapted, line, word, tmp_path):
    plain, converted = (make(tmp_path, kind) for kind in (False, True))
    before = picture(converted)
    for each in (plain, converted) if adapted else ():
        run('pipe.load_lora_weights(a, adapter_name="a")', each)
    loaded = picture(converted)
    if word == "refused":
        with pytest.raises((RuntimeError, ValueError, AttributeError)):
            run(line, converted)
        assert torch.equal(picture(converted), loaded)
    else:
        assert (run(line, plain) == run(line, converted)) == (word == "works")
    if line in TO_THE_BIT:
        assert torch.equal(picture(converted), before if "unload" in line else loaded)
    assert sqnr_db(picture(plain), picture(converted)) > PIPELINE_FLOOR_DB
    assert not adapted or sqnr_db(before, loaded) < PIPELINE_FLOOR_DB - 5  # so that a LoRA left out is seen


def test_the_page_has_both_tables():
    assert (len(ADAPTED), len(BARE)) == (14, 23)
