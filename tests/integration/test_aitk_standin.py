"""The ai-toolkit extension in a stand-in of ai-toolkit's interface (tests/helpers/aitk_standin)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.helpers.aitk_standin.host import Host, standin_host  # noqa: F401
from tests.helpers.asserts import assert_bitwise, assert_sqnr

# -- identity and import ---------------------------------------------------------------------------------------------


def test_host_finds_one_extension_and_no_second_copy_of_our_modules(host: Host) -> None:
    classes = host.start()
    import coat_flux

    facade = sys.modules["extensions.coat_flux"]
    assert [extension.uid for extension in facade.AI_TOOLKIT_EXTENSIONS] == ["coat_flux_trainer"]
    assert "coat_flux.trainers.ai_toolkit.process" not in sys.modules  # other jobs need not import it
    trainer = host.load("coat_flux.trainers.ai_toolkit.process").CoatFluxTrainer
    assert issubclass(trainer, classes["diffusion_trainer"])
    assert facade.COATConfig is coat_flux.COATConfig
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("extensions.coat_flux.config")
    assert [name for name in sys.modules if name.startswith("extensions.coat_flux.")] == []


def test_outside_the_host_the_folder_is_no_extension(host: Host) -> None:
    assert host.load("extensions.coat_flux").AI_TOOLKIT_EXTENSIONS == []


# -- the optimizer name ----------------------------------------------------------------------------------------------


def _bound(host: Host) -> list[Any]:
    modules = ("toolkit.optimizer", "jobs.process.BaseSDTrainProcess", "jobs.process.TrainVAEProcess")
    for name in modules:
        host.load(name)
    return [vars(sys.modules[name])["get_optimizer"] for name in modules]


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 32))]


def test_optimizer_name_works_wherever_it_was_bound(host: Host) -> None:
    from coat_core.optim import FP8AdamW

    host.start()
    bound = _bound(host)
    assert bound[0] is bound[1] is bound[2]
    built = bound[1](
        _parameters(), "coat_fp8_adamw", learning_rate=3e-4, optimizer_params={"block_size": 32, "eps": 1e-7}
    )
    assert isinstance(built, FP8AdamW)
    assert built.fp8_config.block_size == 32
    assert (built.param_groups[0]["lr"], built.param_groups[0]["eps"]) == (3e-4, 1e-7)


def test_other_optimizer_names_reach_the_host_untouched(host: Host) -> None:
    host.load("jobs.process")
    calls: list[tuple[tuple, dict]] = []
    marker = object()

    def original(
        params: Any, optimizer_type: str = "adam", learning_rate: float = 1e-6, optimizer_params: Any = None
    ) -> Any:
        calls.append(((params, optimizer_type), {"learning_rate": learning_rate, "optimizer_params": optimizer_params}))
        return marker

    for module in ("toolkit.optimizer", "jobs.process.BaseSDTrainProcess", "jobs.process.TrainVAEProcess"):
        vars(sys.modules[module])["get_optimizer"] = original
    host.start()
    params, given = _parameters(), {"weight_decay": 0.1}
    assert _bound(host)[2](params, "adamw8bit", learning_rate=1e-4, optimizer_params=given) is marker
    assert calls == [((params, "adamw8bit"), {"learning_rate": 1e-4, "optimizer_params": given})]
    assert calls[0][1]["optimizer_params"] is given


def test_installing_twice_wraps_once_and_reaches_modules_loaded_later(host: Host) -> None:
    host.start()
    (host.root / "late.py").write_text("from toolkit.optimizer import get_optimizer\n")
    wrapper = _bound(host)[0]
    original = wrapper._coat_flux_original
    late = host.load("late")
    late.get_optimizer = original  # as if bound before the wrapper came
    for name in [name for name in sys.modules if name.startswith("coat_flux.trainers.ai_toolkit")]:
        del sys.modules[name]
    installed = host.load("coat_flux.trainers.ai_toolkit.optimizer").install_optimizer()
    assert installed == ["late"]
    assert _bound(host) == [wrapper] * 3
    assert late.get_optimizer is wrapper
    assert not hasattr(original, "_coat_flux_original")
    del sys.modules["late"]


# -- the qtype -------------------------------------------------------------------------------------------------------


def _converted(host: Host, **options: Any) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """A linear and its converted twin."""
    from coat_core.config import FP8LinearConfig

    host.start()
    linear, twin = (torch.nn.Linear(256, 128, dtype=torch.bfloat16) for _ in range(2))
    torch.nn.init.normal_(linear.weight)
    twin.load_state_dict(linear.state_dict())
    host.load("coat_flux.trainers.ai_toolkit.quantizer").convert(
        torch.nn.Sequential(twin), ["0"], FP8LinearConfig(**options)
    )
    return linear, twin


@pytest.mark.parametrize("granularity", ["per_tensor", "per_row"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_converted_linear_keeps_codes_through_casts(host: Host, fmt: str, granularity: str) -> None:
    linear, twin = _converted(host, weight_format=fmt, weight_granularity=granularity)
    before = twin.weight_codes.clone(), twin.weight_scale_bits.clone()
    twin.to(torch.bfloat16).to(torch.float16).half().to(torch.bfloat16)
    assert_bitwise(twin.weight_codes, before[0])
    assert_bitwise(twin.weight_scale_bits, before[1])
    assert type(twin).__name__ == "OstrisLinear"
    assert [name for name, _ in twin.named_parameters()] == ["bias"]
    assert_sqnr(linear.weight, twin.weight, tolerances.UNIFORM_FLOOR_DB[fmt])
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    assert_sqnr(linear(x), twin(x), tolerances.AITK_FORWARD_FLOOR_DB[fmt])


def test_quantizer_restores_what_the_hosts_own_save_keeps(host: Host) -> None:
    _, twin = _converted(host, weight_format="e5m2", weight_granularity="per_row")
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    expected = twin(x)
    del twin.coat_linear_config  # the host's file holds buffers and plain attributes only
    twin.ostris_quantizer = host.load("toolkit.util.ostris_quant").get_ostris_quantizer("coat_fp8")
    assert_bitwise(twin(x), expected)
    assert twin.coat_linear_config.weight_format == "e5m2"


def test_other_qtypes_reach_the_host_untouched(host: Host) -> None:
    host.start()
    get_qtype = host.load("toolkit.util.quantize").get_qtype
    assert get_qtype("half").qtype == "half"
    assert get_qtype("coat_fp8").qtype == "coat_fp8"
    with pytest.raises(KeyError, match="nonsense"):
        get_qtype("nonsense")
