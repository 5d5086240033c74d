"""What COAT does to small models of ai-toolkit's own classes, one JSON object a line.

Runs in ai-toolkit's environment, on a CPU: `AI_TOOLKIT_ROOT=... python tests/helpers/aitk_archs.py [ARCH ...]`.
Compared with the same model without COAT, both with an fp32 LoRA of ai-toolkit's: the cosine of its gradients, all
together and the lowest of one adapter, and the bytes that the blocks keep for backward, counted by the allocator.
"""

import argparse
import contextlib
import functools
import gc
import io
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from aitk_models import MODELS, draw_weights, in_bf16, quantize_as_host
from toolkit_lora import real_network
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

RANK = 4
COAT = {"memory": {"checkpointing": "none"}, "speed": {"measure": "never"}}
SETTINGS = {"bf16": {"enabled": False}, "kept": COAT, "recomputed": {**COAT, "memory": {"checkpointing": "all"}}}


def made(arch: str, qtype: str = "") -> tuple[nn.Module, dict[str, Any]]:
    """The model in bf16, or as ai-toolkit quantizes it, and frozen, with drawn weights, and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[arch]()
    draw_weights(model)
    if qtype:
        quantize_as_host(model, qtype)
    return model.requires_grad_(False).train(), in_bf16(inputs)


def with_lora(model: nn.Module, blocks: tuple[str, ...], options: dict[str, Any]) -> Any:
    """ai-toolkit's fp32 LoRA or LoKr on the linears of the blocks, drawn so that every gradient is there."""
    from toolkit.config_modules import NetworkConfig

    config = NetworkConfig(linear=RANK, **options)
    network = real_network(
        model,
        config.linear,
        network_type=config.type,
        network_config=config,
        target_lin_modules=[type(model).__name__],
        is_transformer=True,
        only_if_contains=None if "UNet" in type(model).__name__ else list(blocks),
    )
    draw = torch.Generator().manual_seed(2)
    for name, parameter in network.named_parameters():
        spread = 0.05 if "lora_up" in name or "lokr_w2" in name else parameter[0].numel() ** -0.5
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=draw) * spread
        parameter.requires_grad_(True)
    network.multiplier = 1.0
    return network


def prepare(
    arch: str, setting: dict[str, Any], qtype: str, options: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any], Any, Any]:
    from coat_flux.blocks.apply import apply_coat
    from coat_flux.blocks.lora import attach_lora
    from coat_flux.blocks.models import family_of
    from coat_flux.config.coat import COATConfig
    from coat_flux.trainers.ai_toolkit.quantizer import convert, plain_linears

    model, inputs = made(arch, qtype)
    config, blocks = COATConfig.from_dict(setting), family_of(model).blocks
    if config.enabled:
        convert(model, plain_linears(model), config.linear_config())
    if hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()  # as ai-toolkit does before its hook
    report = apply_coat(model, config)
    network = with_lora(model, blocks, options)
    if config.enabled and options["type"] == "lora":
        attach_lora(network, config)
    return model, inputs, network, report


def output_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    parts = [x for x in tree_leaves(model(**inputs)) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.cat([x.float().flatten() for x in parts])


def gradients(model: nn.Module, inputs: dict[str, Any], network: Any) -> dict[str, Tensor]:
    output = output_of(model, inputs)
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output - target).square().mean().backward()
    all_gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    for parameter in network.parameters():
        parameter.grad = None
    return {name: gradient for name, gradient in all_gradients.items() if gradient.any()}


@contextlib.contextmanager
def skipped(blocks: list[nn.Module]) -> Iterator[list[int]]:
    """Let blocks keep nothing for backward; yields a list that gets the elements of their outputs."""
    elements: list[int] = []

    def cut(own: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            outputs = own(*args, **kwargs)
        elements.extend(x.numel() for x in tree_leaves(outputs) if isinstance(x, Tensor))
        return tree_map_only(Tensor, lambda x: x.detach().requires_grad_(), outputs)

    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(cut, block.forward)  # type: ignore[method-assign]
    yield elements
    for block, forward in zip(blocks, before, strict=True):
        del block.forward
        if forward is not None:
            block.forward = forward  # type: ignore[method-assign]


def kept_bytes(model: nn.Module, inputs: dict[str, Any], blocks: list[nn.Module]) -> tuple[int, int]:
    """Bytes that the blocks keep for backward where the model does not recompute them, and their outputs' elements."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    whole = alive_bytes(model, inputs)
    with skipped(blocks) as elements:
        output_of(model, inputs)
        count = sum(elements)
        return whole - alive_bytes(model, inputs), count


def alive_bytes(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Bytes allocated in a forward pass and alive after it."""
    from torch.profiler import ProfilerActivity, profile

    output_of(model, inputs)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = output_of(model, inputs)
        gc.collect()
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]") - output.nbytes


def cosine(a: Tensor, b: Tensor) -> float:
    return float(nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def measure(arch: str, qtype: str, options: dict[str, Any]) -> dict[str, Any]:
    from coat_flux.blocks.models import family_of, listed_blocks
    from coat_flux.blocks.runner import BlockRunner

    result: dict[str, Any] = {}
    exact: dict[str, Tensor] = {}
    for name, setting in SETTINGS.items():
        model, inputs, network, report = prepare(arch, setting, qtype, options)
        own = gradients(model, inputs, network)
        if name != "recomputed":
            blocks = list(listed_blocks(model, family_of(model).blocks).values())
            result[f"{name}_bytes"], result["elements"] = kept_bytes(model, inputs, blocks)
        runner = BlockRunner.of(model)
        if runner is None:
            exact, result["class"] = own, type(model).__name__
            continue
        runner.check_step()
        row = next(row for row in report.parts() if row.part == "saved tensors")
        each = {key: cosine(own[key], exact[key]) for key in exact if key in own}
        lowest = min(each, key=each.__getitem__)
        result[name] = {
            "treatment": row.got,
            "bases": sorted(set(report.quantized.values())),
            "cosine": cosine(*(torch.cat([x[key].flatten() for key in each]) for x in (own, exact))),
            "lowest": each[lowest],
            "lowest_of": lowest,
            "gradients": [len(own), len(exact)],
        }
        result["blocks"] = len(runner.blocks)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", metavar="ARCH", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--qtype", action="append", help="of ai-toolkit's own, such as uint4; may be given again")
    parser.add_argument("--lokr", type=json.loads, help="a LoKr with these options, such as '{\"lokr_factor\": 8}'")
    args = parser.parse_args()
    options = {"type": "lora"} if args.lokr is None else {"type": "lokr", **args.lokr}
    sys.path.insert(0, os.environ["AI_TOOLKIT_ROOT"])
    done: dict[Any, dict[str, Any]] = {}
    for qtype, arch in itertools.product(args.qtype or [""], args.archs or MODELS):
        key = MODELS[arch], qtype
        if key not in done:
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # ai-toolkit prints what it makes
                    done[key] = measure(arch, qtype, options)
            except Exception as error:
                done[key] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps({**done[key], "arch": arch, "qtype": qtype}), flush=True)


if __name__ == "__main__":
    main()
