"""`memory.stream_blocks`: a run whose codes are in CPU memory has the bits of one whose codes are on the device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coat_core import FP8Linear
from coat_flux.blocks import streaming
from coat_flux.blocks.runner import BlockRunner
from coat_flux.blocks.streaming import StreamedWeights, codes_of
from coat_flux.trainers.standalone.network import lora_parameters
from coat_flux.watch.casts import CastProbe
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.flux import coat_flux_model, lora_gradients, loss_of, predict


def made(stream: Any, checkpointing: str = "none", flow: str = "fused", weight: str = "e4m3") -> nn.Module:
    memory = {"checkpointing": checkpointing, "stream_blocks": stream}
    return coat_flux_model({"memory": memory, "activation": {"flow": flow}, "weight": {"format": weight}})[0]


def streaming_of(model: nn.Module) -> StreamedWeights:
    return BlockRunner.of(model).streaming  # type: ignore[union-attr, return-value]


HOWS = [("all", ()), (1, ("all",)), ("all", ("none", "generic")), ("all", ("none", "fused", "nvfp4"))]


@pytest.mark.parametrize(("stream", "how"), HOWS)
def test_bits_are_those_of_a_resident_run(stream, how, monkeypatch):
    outside: list[int] = []  # blocks whose codes are not in CPU memory, at each copy
    fetch = StreamedWeights._fetch

    def counted(self: StreamedWeights, place: int) -> None:
        fetch(self, place)
        outside.append(sum(index is not None for index in self._holds))

    monkeypatch.setattr(StreamedWeights, "_fetch", counted)
    resident, streamed = made(0, *how), made(stream, *how)
    count = len(BlockRunner.of(resident).blocks)  # type: ignore[union-attr]
    assert len(streaming_of(streamed).streamed) == (count if stream == "all" else stream)
    for batch in (1,) if "nvfp4" in how else (1, 2):
        assert_all_bitwise(lora_gradients(resident, batch=batch), lora_gradients(streamed, batch=batch))
    with torch.no_grad():
        assert torch.equal(predict(resident), predict(streamed))
    assert 0 < max(outside) <= 2


def test_codes_shared_out_over_processes_are_gathered_to_the_same_bits(monkeypatch):
    """Two processes in turn, each with its own model; what one gathers is taken from where the other keeps it."""
    resident, models, gathered = made(0), [made("all") for _ in range(2)], []
    whole = sum(streaming_of(models[0]).bytes)

    def gather(target: Tensor, source: Tensor, group: str) -> None:
        (index,) = {i for model in models for i, codes in parts(model) if codes is source}
        assert group == "group"
        target.copy_(torch.cat([dict(parts(model))[index] for model in models]))
        gathered.append(index)

    monkeypatch.setattr(streaming.dist, "get_world_size", lambda group: len(models))
    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(streaming.dist, name, gather, raising=False)
    for rank, model in enumerate(models):
        monkeypatch.setattr(streaming.dist, "get_rank", lambda group, rank=rank: rank)
        kept = streaming_of(model).share_out("group")
        assert whole / 2 <= kept <= whole / 2 + 256 * len(streaming_of(model).streamed)
    assert_all_bitwise(lora_gradients(resident), lora_gradients(model))
    order = list(range(len(streaming_of(model).streamed)))
    assert gathered == [*order, *order[-3::-1]]  # the last two are still there when backward begins
    with torch.no_grad():
        assert torch.equal(predict(resident), predict(model))


def parts(model: nn.Module) -> list[tuple[int, Tensor]]:
    return [(i, codes.host) for i, codes in enumerate(streaming_of(model)._codes) if codes.host is not None]


def test_buffers_are_the_slots_again_after_the_model_was_moved():
    resident, streamed = made(0), made("all")
    streamed._apply(lambda x: x.clone())
    assert_all_bitwise(lora_gradients(resident), lora_gradients(streamed))
    buffers = [x for module in streamed.modules() for x in codes_of(module).values()]
    assert len({x.untyped_storage()._cdata for x in buffers}) == streaming.SLOTS


def test_weights_can_be_read_at_any_time_and_blocks_come_back_to_the_device_and_leave_it():
    resident, streamed = made(0), made("all")
    expected, weights = lora_gradients(resident), streaming_of(streamed)
    assert_all_bitwise(expected, lora_gradients(streamed))
    for name, module in resident.named_modules():
        if isinstance(module, FP8Linear):
            assert torch.equal(module.weight, streamed.get_submodule(name).weight)
    for chosen in ((), (1,), (0, 1)):
        weights.stream(chosen)
        assert weights.streamed == list(chosen)
        assert_all_bitwise(expected, lora_gradients(streamed))


def test_casts_are_those_of_the_layers_whose_codes_are_there():
    """One slot is the memory of many blocks; a block that came back to the device has one storage for all layers."""
    resident, streamed = made(0), made("all")
    predict(resident).sum().backward()
    expected = rows_of(resident)
    assert len({row.layer for row in expected}) > 20
    predict(streamed).sum().backward()
    assert rows_of(streamed) == expected
    streaming_of(streamed).stream((1,))
    assert rows_of(streamed) == expected


def rows_of(model: nn.Module) -> list[Any]:
    model.zero_grad(set_to_none=True)
    with CastProbe(model, lora_parameters(model)) as probe:
        loss_of(predict(model)).backward()
    # of what is saved only the block is known, by its first product
    return [row for row in probe.rows(1) if row.kind != "saved"]
