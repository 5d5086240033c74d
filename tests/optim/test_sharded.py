"""FP8AdamW under FSDP2: real processes (gloo), and what one process can tell without others."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

from coat_core.config import FP8LinearConfig, FP8QuantizationConfig
from coat_core.linear.module import FP8TrainableLinear
from coat_core.optim.sharded import ShardedFP8AdamW, cut_parameters, gather
from tests.helpers.asserts import assert_bitwise

BLOCK, STEPS, MORE = 64, 3, 2


class Layer(nn.Module):
    """A linear trained with FP8 GEMMs, and next to it frozen codes, which FSDP2 gathers as codes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = FP8TrainableLinear.from_linear(nn.Linear(inputs, outputs), FP8LinearConfig())
        self.norm = nn.LayerNorm(outputs)
        codes = torch.randn(outputs, outputs).to(torch.float8_e4m3fn).view(torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.codes.view(torch.float8_e4m3fn).float()
        return self.norm(self.linear(x)) @ frozen.t() / 16


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(64, 128), Layer(128, 32))


def make_optimizer(model: nn.Module) -> ShardedFP8AdamW:
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    config = FP8QuantizationConfig(block_size=BLOCK, moment_rounding="stochastic")  # draws by the element of the whole
    return ShardedFP8AdamW(named, lr=1e-2, fp8_config=config)


def loss_of(model: nn.Module, step: int, half: int) -> Tensor:
    torch.manual_seed(100 * step + half)
    return model(torch.randn(16, 64)).square().mean()


def train_alone(model: nn.Module, optimizer: ShardedFP8AdamW, steps: range, halves: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        for half in range(halves):
            (loss_of(model, step, half) / halves).backward()
        optimizer.step()


def shard(model: nn.Module) -> set[nn.Parameter]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = cut_parameters(model, mesh.size(), BLOCK)
    for layer in (*model, model):
        sharded = fully_shard(layer, mesh=mesh, ignored_params=whole)
        sharded.set_gradient_divide_factor(1.0)  # a sum, not a mean, which gloo has only with the next line
        sharded.set_force_sum_reduction_for_comms(True)
    return whole


def train_sharded(model: nn.Module, optimizer: ShardedFP8AdamW, whole: set[nn.Parameter], steps: range) -> None:
    rank, processes = dist.get_rank(), dist.get_world_size()
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model, step, rank) / processes).backward()
        for param in (param for param in model.parameters() if param in whole):
            dist.all_reduce(param.grad)
        optimizer.step()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    trained = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    return gather(trained, keep=True)


def work(rank: int, processes: int, port: int, folder: Path, resumes: bool) -> None:
    """One process: train, or go on from what two have saved; the first one writes all of it as one."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    model = make_model()
    if resumes:
        saved = torch.load(folder / "end_of_2.pt", weights_only=True)
        model.load_state_dict(saved["model"], strict=False)
    whole = shard(model)
    optimizer = make_optimizer(model)
    if resumes:
        optimizer.load_whole_state_dict(saved["optim"])
        assert_same(saved["optim"]["state"], optimizer.whole_state_dict()["state"])
        other = make_optimizer(model)
        dcp.load(other.checkpoint_state(), checkpoint_id=folder / "saved")
        assert_same(saved["optim"]["state"], other.whole_state_dict()["state"])
        train_sharded(model, optimizer, whole, range(STEPS, STEPS + MORE))
    else:
        assert {type(param).__name__ for param in (model[0].codes, model[0].linear.weight)} == {"DTensor"}
        assert sum(param.numel() for param in whole) == 3 * 32
        train_sharded(model, optimizer, whole, range(STEPS))
        dcp.save(state := optimizer.checkpoint_state(), checkpoint_id=folder / "saved")
        assert state["0.linear.weight"]["exp_avg_codes e4m3 (block 64, expanded)"].dtype == torch.uint8
        file = optimizer.whole_state_dict(keep=rank == 0)
        assert bool(file["state"]) == (rank == 0)
        group = {**file["param_groups"][0], "fp8": {"block_size": 32 * 1024}}  # as if written with longer blocks
        file = {"state": {0: {"step": torch.zeros(()), "exp_avg_scale": torch.ones(1)}}, "param_groups": [group]}
        with pytest.raises(ValueError, match=r"linear\.weight over 2 processes: a shard cuts a block of 32768 moments"):
            optimizer.load_whole_state_dict(file)
    final = {"model": whole_weights(model), "optim": optimizer.whole_state_dict()}
    if rank == 0:
        torch.save(final, folder / f"end_of_{processes}.pt")
    dist.destroy_process_group()


def run(processes: int, folder: Path, *, resumes: bool = False) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_method = "spawn" if torch.cuda.is_available() else "fork"  # fork imports nothing again
    torch.multiprocessing.start_processes(
        work, (processes, port, folder, resumes), processes, start_method=start_method
    )
    return torch.load(folder / f"end_of_{processes}.pt", weights_only=True)


def assert_same(left: dict[Any, Any], right: dict[Any, Any]) -> None:
    """Trees of the same keys and bits."""
    tree_map(assert_bitwise, left, right)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run(2, folder)


def test_two_processes_are_one_to_the_bit_and_one_resumes_them(two):
    end = two[1]
    model = make_model()
    optimizer = make_optimizer(model)
    train_alone(model, optimizer, range(STEPS), halves=2)
    assert_same(end["model"], whole_weights(model))
    assert_same(end["optim"]["state"], optimizer.state_dict()["state"])
    assert end["optim"]["param_groups"] == optimizer.state_dict()["param_groups"]
    again = make_model()
    again.load_state_dict(end["model"], strict=False)
    resumed = make_optimizer(again)
    resumed.load_whole_state_dict(end["optim"])
    for trained in ((model, optimizer), (again, resumed)):
        train_alone(*trained, range(STEPS, STEPS + MORE), halves=2)
    assert_same(whole_weights(model), whole_weights(again))
    assert_same(optimizer.state_dict()["state"], resumed.state_dict()["state"])


def test_three_processes_resume_two(two):
    folder, saved = two
    end = run(3, folder, resumes=True)
    model = make_model()
    model.load_state_dict(saved["model"], strict=False)
    optimizer = make_optimizer(model)
    optimizer.load_whole_state_dict(saved["optim"])
    train_alone(model, optimizer, range(STEPS, STEPS + MORE), halves=3)
    for name, value in whole_weights(model).items():
        torch.testing.assert_close(end["model"][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("shape", "processes", "cut"),
    [
        ((48, 128), 5, False),
        ((48, 32), 2, False),
        ((48, 32), 5, False),
        ((50, 32), 2, True),
        ((128,), 2, False),
        ((96,), 2, True),
        ((10, 100), 2, True),
        ((), 2, True),
    ],
)
def test_what_a_shard_would_cut(shape, processes, cut):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    module.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    assert bool(cut_parameters(module, processes, BLOCK)) is cut
