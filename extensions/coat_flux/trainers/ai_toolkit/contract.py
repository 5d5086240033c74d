"""What this extension uses of ai-toolkit: names and arguments, probed when a job of ours starts, whatever the version.

A misfit ends such a job, naming what changed and where; other jobs are not probed. docs/ai-toolkit.md lists what did.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .host import LORA_MODULES, MARK, OPTIMIZER_MODULE, PROCESS_MODULE, QUANTIZER_MODULE, AIToolkitError, load_core

if TYPE_CHECKING:
    from torch import nn

# dotted names; of what is called also the number of positional arguments, then keywords: `name/2/device`
MODULES = {
    "toolkit.print": "print_acc/1",
    OPTIMIZER_MODULE: "get_optimizer/0/params/optimizer_type/learning_rate/optimizer_params",
    QUANTIZER_MODULE: "get_ostris_quantizer/1 convert_linear_to_ostris/2 OstrisLinear OstrisQuantizer.can_quantize/2 "
    "OstrisQuantizer.quantize_/3 OstrisQuantizer.dequantize/2 OstrisQuantizer.requantize_/3 OstrisQuantizer.forward/3",
}
PROCESS = """
config job.name meta save_root training_seed trigger_word device_torch step_num start_step epoch_num is_ui_trainer
network ema data_loader data_loader_reg dataset_configs embed_config adapter_config decorator_config
model_config.name_or_path model_config.arch model_config.is_flux
model_config.quantize model_config.qtype model_config.quantize_kwargs
train_config.steps train_config.start_step train_config.batch_size train_config.gradient_accumulation
train_config.optimizer train_config.lr train_config.max_grad_norm train_config.gradient_checkpointing
train_config.merge_network_on_save train_config.unload_text_encoder save_config.save_every
accelerator.num_processes accelerator.is_main_process accelerator.backward/1 accelerator.clip_grad_norm_/2
get_conf/2 add_meta/1 get_latest_save_path/0 clean_up_saves/0 post_save_hook/1 on_error/1 ensure_params_requires_grad/0
should_stop/0 should_return_to_queue/0
predict_noise/0/noisy_latents/is_primary_pred calculate_loss get_guided_loss get_mean_flow_loss
"""
NETWORK_CONFIG = "type linear conv transformer_only network_kwargs"
MODEL = "unet text_encoder"
HELD_OUT_MODULES = {
    "toolkit.data_loader": "get_dataloader_from_datasets/3",
    "toolkit.prompt_utils": "concat_prompt_embeds/1",
    "toolkit.train_tools": "get_torch_dtype/1",
}
HELD_OUT_MODEL = """
vae is_flow_matching prediction_type noise_scheduler encode_images/1/device encode_prompt/1 decode_latents/1
text_encoder_to/1 add_noise/3 inject_trigger_into_prompt/1/trigger/add_if_not_present
predict_noise/0/latents/conditional_embeddings/timestep/guidance_scale/guidance_embedding_scale/bypass_guidance_embedding
"""
NETWORK = "can_merge_in did_change_weights is_active is_merged_in is_lorm _multiplier torch_multiplier"
LORA = "lora_down lora_up org_forward network_ref scale dropout rank_dropout module_dropout"
DATA = "dataset.datasets batch_size collate_fn"
AVERAGE = "shadow_params eval/0 train/0"
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def misfits(owner: Any, label: str, pieces: str) -> list[str]:
    """Those of the pieces that `owner` has not, or that cannot be called as we do."""
    lines = []
    for piece in pieces.split():
        name, *call = piece.split("/")
        target = owner
        try:
            for part in name.split("."):
                target = getattr(target, part)
        except AttributeError:
            lines.append(f"{label} has no {name}")
            continue
        if call:
            signature = inspect.signature(target)
            try:
                signature.bind(*[None] * int(call[0]), **dict.fromkeys(call[1:]))
            except TypeError as error:
                lines.append(f"{label}.{name} takes {signature}{place_of(target)}: {error}")
    return lines


def place_of(target: Any) -> str:
    """Where the source of a class or function is: ` in toolkit/optimizer.py, line 4`."""
    try:
        file = Path(str(inspect.getsourcefile(target)))
        return f" in {'/'.join(file.parts[-2:])}, line {inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return ""


def in_modules(pieces: dict[str, str]) -> list[str]:
    """Misfits of functions and classes in modules."""
    lines = []
    for name, used in pieces.items():
        try:
            lines += misfits(importlib.import_module(name), name, used)
        except ImportError as error:
            lines.append(f"{name} cannot be imported ({error})")
    return lines


def require(lines: Iterable[str]) -> None:
    """Raise AIToolkitError with all lines, if there are any."""
    if problems := list(dict.fromkeys(lines)):
        raise AIToolkitError("; ".join(problems))


def require_module(name: str) -> None:
    """Import a module; raise AIToolkitError if what is used of it does not fit."""
    require(in_modules({name: MODULES[name]}))


def check_overrides(ours: type, theirs: type) -> None:
    """Check that the methods we override are there and take no argument that ours do not hand on."""
    lines = []
    for name, own in vars(ours).items():
        if not callable(own) or name.startswith("_"):
            continue
        original = getattr(theirs, name, None)
        if original is None:
            lines.append(f"{theirs.__name__} has no {name}")
            continue
        accepted = inspect.signature(own).parameters
        their = [each.name for each in inspect.signature(original).parameters.values() if each.kind not in VARIABLE]
        more = their[len(accepted) :]
        if more and "kwargs" not in accepted:
            lines.append(f"{theirs.__name__}.{name} also takes {', '.join(more)}{place_of(original)}")
    require(lines)


def check_start(process: Any, *installs: Callable[[], Any]) -> None:
    """Check what is used before the model is loaded; that optimizer, qtype and linears of ours are known."""
    lines = []
    for install in (load_core, *installs):
        try:
            install()
        except AIToolkitError as error:
            lines.append(error.piece)
    lines += in_modules(MODULES)
    module = sys.modules.get(PROCESS_MODULE)
    if not hasattr(None if module is None else vars(module).get("get_optimizer"), MARK):
        lines.append(f"{PROCESS_MODULE} does not use {OPTIMIZER_MODULE}.get_optimizer")
    for name in LORA_MODULES:
        if "OstrisLinear" not in getattr(importlib.import_module(name), "LINEAR_MODULES", ()):
            lines.append(f"{name}.LINEAR_MODULES does not list OstrisLinear: LoRA would not find FP8 linears")
    label = type(process).__mro__[1].__name__
    lines += misfits(process, label, PROCESS)
    if process.network_config is not None:
        lines += misfits(process.network_config, "network_config", NETWORK_CONFIG)
    require(lines)


def check_model(sd: Any, held_out: bool = False) -> None:
    """Check what is used of the loaded model: in training, or to measure held-out photos."""
    lines = in_modules(HELD_OUT_MODULES) if held_out else []
    require(lines + misfits(sd, type(sd).__name__, HELD_OUT_MODEL if held_out else MODEL))


def check_network(network: nn.Module) -> None:
    """Check the structure of the LoRA and of its modules."""
    from ...blocks.lora import base_of

    modules = [module for module in network.modules() if hasattr(module, "lora_name")]
    if not modules:
        raise AIToolkitError("the LoRA network found no linear to train; check network.network_kwargs.only_if_contains")
    lines = misfits(network, type(network).__name__, NETWORK)
    for module in modules:
        label = f"{type(module).__name__}{place_of(type(module))}"
        lines += misfits(module, label, LORA)
        if base_of(module) is None:
            lines.append(f"{label} has neither org_module nor orig_module_ref")
    require(lines)


def check_data(process: Any) -> None:
    """Check what a resume uses of the data and of the average."""
    lines = [] if process.ema is None else misfits(process.ema, "ema", AVERAGE)
    for name in ("data_loader", "data_loader_reg"):
        loader = getattr(process, name)
        if loader is not None:
            lines += misfits(loader, name, DATA)
            for dataset in getattr(loader.dataset, "datasets", ()):
                lines += misfits(dataset, type(dataset).__name__, "file_list")
    require(lines)
