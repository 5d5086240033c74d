"""The order of events of a LoRA job, with the hooks an extension may fill."""

import copy
import os
from types import SimpleNamespace

import torch
from toolkit.lora_special import LoRASpecialNetwork
from toolkit.optimizer import get_optimizer
from toolkit.print import print_acc
from toolkit.util.quantize import get_qtype, quantize
from torch import nn


class Accelerator:
    num_processes = 1
    is_main_process = True

    def backward(self, loss):
        loss.backward()


ACCELERATOR = Accelerator()


class ToyBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.to_q = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x):
        return x + self.to_out(torch.nn.functional.gelu(self.to_q(x)))


class FluxTransformer2DModel(nn.Module):
    """Two toy blocks between an embedder and a projection, with FLUX's module names."""

    def __init__(self, width=32):
        super().__init__()
        self.x_embedder = nn.Linear(width, width)
        self.transformer_blocks = nn.ModuleList([ToyBlock(width)])
        self.single_transformer_blocks = nn.ModuleList([ToyBlock(width)])
        self.proj_out = nn.Linear(width, width)
        self.run_block = lambda block, *args: block(*args)

    def enable_gradient_checkpointing(self, function):
        self.run_block = function

    def forward(self, x):
        x = self.x_embedder(x)
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            x = self.run_block(block, x) if torch.is_grad_enabled() else block(x)
        return self.proj_out(x)


class BaseSDTrainProcess:
    def __init__(self, process_id, job, config, **kwargs):
        self.process_id, self.job, self.config = process_id, job, config
        model, train = dict(config.get("model") or {}), dict(config.get("train") or {})
        self.model_config = SimpleNamespace(
            quantize=model.get("quantize", False),
            qtype=model.get("qtype", "half"),
            is_flux=True,
            name_or_path=model.get("name_or_path", "black-forest-labs/FLUX.1-dev"),
            quantize_kwargs=model.get("quantize_kwargs", {}),
        )
        self.train_config = SimpleNamespace(
            optimizer=train.get("optimizer", "adamw"),
            optimizer_params=train.get("optimizer_params", {}),
            lr=train.get("lr", 1e-3),
            gradient_checkpointing=train.get("gradient_checkpointing", True),
            steps=train.get("steps", 3),
        )
        network = {"type": "lora", "linear": 4, **(config.get("network") or {})}
        self.network_config = SimpleNamespace(**network)
        self.save_root = os.path.join(config["training_folder"], job.name)
        self.accelerator = ACCELERATOR
        self.device_torch = torch.device("cpu")
        self.network = None
        self.progress_bar = None
        self.step_num = self.start_step = train.get("start_step", 0)
        self.losses = []

    def get_conf(self, key, default=None):
        return self.config.get(key, default)

    def hook_before_model_load(self):
        pass

    def hook_after_model_load(self):
        pass

    def hook_add_extra_train_params(self, params):
        return params

    def before_dataset_load(self):
        pass

    def hook_before_train_loop(self):
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def hook_train_loop(self, batch):
        raise NotImplementedError

    def post_save_hook(self, save_path):
        pass

    def done_hook(self):
        pass

    def on_error(self, error):
        pass

    def run(self):
        os.makedirs(self.save_root, exist_ok=True)
        self.hook_before_model_load()
        config = copy.deepcopy(self.model_config)
        torch.manual_seed(0)
        self.sd = SimpleNamespace(unet=FluxTransformer2DModel(), text_encoder=[nn.Sequential(nn.Linear(32, 32))])
        if config.quantize:
            quantize(self.sd.unet, get_qtype(config.qtype), **config.quantize_kwargs)
            quantize(self.sd.text_encoder[0], get_qtype(config.qtype))
        self.sd.unet.to(torch.bfloat16).requires_grad_(False)
        self.hook_after_model_load()
        self.network = LoRASpecialNetwork(self.sd.unet, self.network_config.linear, ("blocks",))
        self.network.force_to(torch.float32)
        if config.quantize:
            self.network.can_merge_in = False
        params = self.hook_add_extra_train_params(
            [{"params": list(self.network.parameters()), "lr": self.train_config.lr}]
        )
        self.optimizer = get_optimizer(
            params, self.train_config.optimizer.lower(), self.train_config.lr, self.train_config.optimizer_params
        )
        self._load_optimizer()
        self.before_dataset_load()
        self.hook_before_train_loop()
        self.sample()
        for step in range(self.step_num, self.train_config.steps):
            batch = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            self.losses.append(self.hook_train_loop([batch])["loss"])
            self.step_num = step + 1
        self.save()
        del self.sd, self.network
        self.done_hook()

    def _load_optimizer(self):
        path = os.path.join(self.save_root, "optimizer.pt")
        if not os.path.exists(path):
            return
        try:
            self.optimizer.load_state_dict(torch.load(path, weights_only=True))
        except Exception as error:
            print_acc("Failed to load optimizer state", error)

    @torch.no_grad()
    def sample(self):
        self.sd.unet(torch.zeros(1, 4, 32, dtype=torch.bfloat16))
        self.sd.unet.to("cpu", dtype=torch.bfloat16)

    def save(self):
        torch.save(self.network.state_dict(), os.path.join(self.save_root, "lora.pt"))
        path = os.path.join(self.save_root, "optimizer.pt")
        torch.save(self.optimizer.state_dict(), path)
        self.post_save_hook(path)
