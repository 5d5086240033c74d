"""Step counters and lr on the device, for CUDA graphs: the same training, in another place."""

import pytest
import torch
from torch.nn import Parameter

from coat_core.config import FP8QuantizationConfig
from coat_core.optim import FP8AdamW
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import CONFIGS, assert_same, copies, make_params, params_of, run, set_grads
from tests.tolerances import CAPTURABLE_PARAM_RTOL

SHAPES = [(16, 20), (7,), (129,), ()]


def on(device: torch.device) -> list[Parameter]:
    return [Parameter(param.detach().to(device)) for param in make_params(SHAPES)]


def assert_close(ours: list[Parameter], theirs: list[Parameter]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=CAPTURABLE_PARAM_RTOL, atol=1e-6)


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", ["unquantized", "default", "integers", "drawn"])
def test_capturable_trains_as_without(name, tensor_lr, device):
    """Moments to the bit, draws included; each parameter counts its own steps."""
    config, made = CONFIGS.get(name, FP8QuantizationConfig(use_dynamic_range_expansion=False)), []
    for capturable in (False, True):
        params = on(device)
        lr = torch.tensor(1e-3, device=device) if tensor_lr and capturable else 1e-3
        groups = [{"params": params[:1], "lr": 1e-2}, {"params": params[1:], "weight_decay": 0.3}]
        made.append(FP8AdamW(groups, lr=lr, capturable=capturable, fp8_config=config))
        run(made[-1], params, range(6), gaps=True)
    for theirs, ours in zip(*map(params_of, made), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=CAPTURABLE_PARAM_RTOL, atol=1e-6)
        state = made[1].state[ours]
        assert (state["step"].device.type, state["step"].item()) == (device.type, 4.0)
        for key, value in made[0].state[theirs].items():
            assert_bitwise(state[key], value.to(device))


@pytest.mark.parametrize("name", ["unquantized", "integers"])
def test_a_step_is_skipped_where_the_device_says_so(name, device):
    optimizer, twin = (FP8AdamW(on(device), lr=1e-3, capturable=True, fp8_config=CONFIGS[name]) for _ in range(2))
    for step, skipped in enumerate([1.0, 0.0, 1.0, 1.0, 0.0]):
        optimizer.found_inf = torch.tensor(skipped, device=device)
        set_grads(params_of(optimizer), step)
        if skipped:
            params_of(optimizer)[step % 2].grad.fill_(float("nan" if step else "inf"))
        optimizer.step()
        if not skipped:
            run(twin, params_of(twin), range(step, step + 1))
    assert_same(optimizer, twin)
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_found_inf_needs_counters_on_the_device():
    params = make_params(SHAPES)
    optimizer = FP8AdamW(params)
    optimizer.found_inf = torch.zeros(())
    set_grads(params, 0)
    with pytest.raises(ValueError, match="found_inf: needs step counters on the device; pass capturable=True"):
        optimizer.step()


@pytest.mark.parametrize("saved", [False, True])
def test_state_loads_across_both(saved, device):
    params = on(device)
    optimizer = FP8AdamW(params, capturable=saved, fp8_config=CONFIGS["plain"])
    run(optimizer, params, range(3))
    twins = copies(params)
    twin = FP8AdamW(twins, capturable=not saved, fp8_config=CONFIGS["plain"])
    twin.load_state_dict(optimizer.state_dict())
    assert twin.param_groups[0]["capturable"] is not saved
    run(optimizer, params, range(3, 5))
    run(twin, twins, range(3, 5))
    assert_close(twins, params)
    assert twin.state[twins[0]]["step"].device.type == ("cpu" if saved else device.type)
    assert twin.state[twins[0]]["step"].item() == 5.0


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_no_step_waits_for_the_gpu(capturable, tensor_lr):
    device = torch.device("cuda")
    params = on(device)
    lr = torch.tensor(1e-3, device=device) if tensor_lr else 1e-3
    optimizer = FP8AdamW(params, lr=lr, capturable=capturable)
    for step in range(3):
        set_grads(params, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # a process's first operator tries Triton
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.state[params[0]]["step"].item() == 3.0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["unquantized", "default", "integers"])
def test_a_replayed_graph_goes_on_as_steps_do(name):
    """Warm-up on a side stream, capture, three replays with new gradients and another lr, against eager steps."""
    device = torch.device("cuda")
    ours, theirs = on(device), on(device)
    lr = torch.tensor(1e-3, device=device)
    optimizer = FP8AdamW(ours, lr=lr, capturable=True, fp8_config=CONFIGS[name])
    eager = FP8AdamW(theirs, lr=1e-3, capturable=True, fp8_config=CONFIGS[name])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(optimizer, ours, range(2))
    torch.cuda.current_stream().wait_stream(side)
    for param in ours:
        param.grad = torch.zeros_like(param)  # new addresses: the capture needs a table of its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    run(eager, theirs, range(2))
    for step in range(2, 5):
        grads = on(device)
        set_grads(grads, step)
        for param, other in zip(ours, grads, strict=True):
            param.grad.copy_(other.grad)
        lr.fill_(1e-3 * step)
        eager.param_groups[0]["lr"] = 1e-3 * step
        graph.replay()
        run(eager, theirs, range(step, step + 1))
    assert_close(ours, theirs)
    assert optimizer.state[ours[0]]["step"].item() == 5.0


@pytest.mark.gpu
def test_a_capture_needs_capturable_and_a_state():
    params = on(torch.device("cuda"))
    set_grads(params, 0)
    for optimizer, message in (
        (FP8AdamW(params), "capturable=False"),
        (FP8AdamW(params, capturable=True), "do a step before the capture"),
    ):
        with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


CHANGES = {
    "replaced": lambda state, key: state.update({key: state[key] * 2}),
    "moved": lambda state, key: setattr(state[key], "data", state[key].data * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq_scale", "step"])
def test_a_state_tensor_that_somebody_replaced_counts(change, key):
    """The state lies packed, but what stands in `state` is what is used."""
    config = CONFIGS["plain" if key.endswith("scale") else "unquantized"]
    made = []
    for by in (change, lambda state, key: state[key].mul_(2)):
        params = make_params(SHAPES)
        made.append(FP8AdamW(params, fp8_config=config))
        run(made[-1], params, range(2))
        by(made[-1].state[params[0]], key)
        run(made[-1], params, range(2, 4))
    assert_same(*made)


def test_parameters_that_join_later_keep_the_state_of_the_others():
    """A first gradient for more parameters makes a new packed state; what was read from it before stays in place."""
    together, alone = make_params(SHAPES), make_params(SHAPES)
    optimizer, first = FP8AdamW(together), FP8AdamW(alone[:2])
    run(optimizer, together[:2], range(2))
    entry = optimizer.state[together[0]]
    _ = optimizer.state[together[3]]  # an empty entry of torch's defaultdict
    run(optimizer, together, range(2, 4))
    assert optimizer.state[together[0]] is entry
    run(first, alone[:2], range(2))
    run(first, alone, range(2, 4))
    for a, b in zip(together[:2], alone[:2], strict=True):
        assert torch.equal(a, b)
    assert [optimizer.state[param]["step"].item() for param in together] == [4.0, 4.0, 2.0, 2.0]
