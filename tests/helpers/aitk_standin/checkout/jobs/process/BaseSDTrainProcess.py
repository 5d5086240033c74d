"""The order of events of a LoRA job, with the hooks an extension may fill."""

import copy
import glob
import json
import os
import random
from collections import OrderedDict
from types import SimpleNamespace

import torch
import yaml
from safetensors import safe_open
from toolkit.data import get_dataloader_from_datasets
from toolkit.ema import ExponentialMovingAverage
from toolkit.lora_special import LoRASpecialNetwork
from toolkit.optimizer import get_optimizer
from toolkit.print import print_acc
from toolkit.util import quantize as quantization
from torch import nn
from version import IS_NEWER


class Accelerator:
    num_processes = 1
    is_main_process = True

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, max_norm):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


ACCELERATOR = Accelerator()


class ToyBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn = nn.Module()
        self.attn.to_q = nn.Linear(width, width)
        self.attn.to_k = nn.Linear(width, width)

    def forward(self, x):
        return x + self.attn.to_k(torch.nn.functional.gelu(self.attn.to_q(x)))


class FluxTransformer2DModel(nn.Module):
    """Two toy blocks between an embedder and a projection, with FLUX's module names."""

    def __init__(self, width=32):
        super().__init__()
        self.x_embedder = nn.Linear(width, width)
        self.transformer_blocks = nn.ModuleList([ToyBlock(width)])
        self.single_transformer_blocks = nn.ModuleList([ToyBlock(width)])
        self.proj_out = nn.Linear(width, width)
        self._gradient_checkpointing_func = lambda block, *args: block(*args)

    def enable_gradient_checkpointing(self, function):
        self._gradient_checkpointing_func = function

    def forward(self, x):
        x = self.x_embedder(x)
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            x = self._gradient_checkpointing_func(block, x) if torch.is_grad_enabled() else block(x)
        return self.proj_out(x)


MODEL = {"quantize": False, "qtype": "half", "is_flux": True, "arch": "flux", "quantize_kwargs": {}, "compile": False}
TRAIN = {"optimizer": "adamw", "optimizer_params": {}, "lr": 1e-3, "gradient_checkpointing": True, "ema_config": {}}
TRAIN |= {"steps": 3, "start_step": None, "batch_size": 1, "gradient_accumulation": 1, "max_grad_norm": 1.0}
TRAIN |= {"unload_text_encoder": False}
NETWORK = {"type": "lora", "linear": 4, "conv": None, "transformer_only": True, "network_kwargs": {}}
DATASET = {"dataset_path": None, "mask_path": None, "alpha_mask": False, "num_frames": 1, "is_reg": False}
DATASET |= {"num_workers": 0}


def _config(raw, defaults, **more):
    return SimpleNamespace(**copy.deepcopy(defaults) | more | (raw or {}))


def _nothing(self, *args, **kwargs):
    pass


class BaseSDTrainProcess:
    def __init__(self, process_id, job, config, **kwargs):
        self.process_id, self.job, self.config = process_id, job, config
        self.meta = OrderedDict()
        self.save_root = os.path.join(config["training_folder"], job.name)
        os.makedirs(self.save_root, exist_ok=True)
        with open(os.path.join(self.save_root, "config.yaml"), "w") as file:
            yaml.safe_dump(job.raw_config, file)
        self.training_seed = self.get_conf("training_seed")
        if self.training_seed is not None:
            torch.manual_seed(self.training_seed)
            random.seed(self.training_seed)
        self.trigger_word = self.get_conf("trigger_word")
        self.model_config = _config(config.get("model"), MODEL)
        self.train_config = _config(config.get("train"), TRAIN, merge_network_on_save=False)
        self.network_config = _config(config.get("network"), NETWORK)
        self.save_config = _config(config.get("save"), {"save_every": 1000, "max_step_saves_to_keep": 2})
        self.dataset_configs = [
            _config({**raw, "resolution": resolution}, DATASET)
            for raw in config["datasets"]
            for resolution in raw["resolution"]
        ]
        self.sample_every = (config.get("sample") or {}).get("sample_every")
        self.embed_config = self.adapter_config = self.decorator_config = None
        self.accelerator = ACCELERATOR
        self.device_torch = torch.device("cpu")
        self.network = self.ema = self.progress_bar = self.data_loader = self.data_loader_reg = None
        self.step_num = self.start_step = self.epoch_num = 0
        self.losses, self.drawn_at = [], []

    def get_conf(self, key, default=None):
        return self.config.get(key, default)

    def add_meta(self, more):
        self.meta.update(more)

    def hook_add_extra_train_params(self, params):
        return params

    def hook_before_train_loop(self):
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def post_process_generate_image_config_list(self, images):
        return images

    hook_before_model_load = hook_after_model_load = before_dataset_load = hook_train_loop = end_step_hook = _nothing
    ensure_params_requires_grad = sample_step_hook = post_save_hook = done_hook = on_error = _nothing

    def run(self):
        self.hook_before_model_load()
        self._load_model()
        self.hook_after_model_load()
        self._make_network()
        params = self.hook_add_extra_train_params(
            [{"params": list(self.network.parameters()), "lr": self.train_config.lr}]
        )
        if self.train_config.start_step is not None:
            self.step_num = self.start_step = self.train_config.start_step
        self.optimizer = get_optimizer(
            params, self.train_config.optimizer.lower(), self.train_config.lr, self.train_config.optimizer_params
        )
        self._load_optimizer()
        if self.train_config.ema_config.get("use_ema"):
            self.ema = ExponentialMovingAverage(self.network.parameters(), self.train_config.ema_config["ema_decay"])
        self.lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=100)
        self.before_dataset_load()
        self.data_loader = get_dataloader_from_datasets(self.dataset_configs, self.train_config.batch_size)
        self.hook_before_train_loop()
        self.sample()
        self._loop()
        self.save()
        self.sample(self.step_num)
        del self.sd, self.network
        self.done_hook()

    def _load_model(self):
        config = copy.deepcopy(self.model_config)
        random_state = torch.get_rng_state()
        torch.manual_seed(0)
        self.sd = SimpleNamespace(unet=FluxTransformer2DModel(), text_encoder=[nn.Sequential(nn.Linear(32, 32))])
        torch.set_rng_state(random_state)
        encoder, options = self.sd.text_encoder[0], config.quantize_kwargs
        if config.quantize and IS_NEWER:
            blocks = ("transformer_blocks", "single_transformer_blocks")
            quantization.quantize_module(self.sd.unet, config.qtype, block_names=blocks, quantize_kwargs=options)
            quantization.quantize_module(encoder, config.qtype, quantize_kwargs=options)
        elif config.quantize:
            quantization.quantize(self.sd.unet, quantization.get_qtype(config.qtype), **options)
            quantization.quantize(encoder, quantization.get_qtype(config.qtype))
        if IS_NEWER:  # it gives a loaded model a class of its own, of the same name
            self.sd.unet.__class__ = type("FluxTransformer2DModel", (FluxTransformer2DModel,), {})
        self.sd.unet.to(torch.bfloat16).requires_grad_(False)

    def _make_network(self):
        self.network = LoRASpecialNetwork(self.sd.unet, self.network_config.linear, ("blocks",))
        self.network.force_to(torch.float32)
        if self.model_config.quantize:
            self.network.can_merge_in = False
        newest = self.get_latest_save_path()
        if newest is not None:
            print_acc(f"#### IMPORTANT RESUMING FROM {newest} ####")
            self.network.load_weights(newest)
            with safe_open(newest, framework="pt") as file:
                self.step_num = self.start_step = json.loads(file.metadata()["training_info"])["step"]

    def get_latest_save_path(self):
        found = glob.glob(os.path.join(self.save_root, f"{self.job.name}*.safetensors"))
        return max(found, key=os.path.getctime, default=None)

    def _load_optimizer(self):
        path = os.path.join(self.save_root, "optimizer.pt")
        if not os.path.exists(path):
            return
        try:
            self.optimizer.load_state_dict(torch.load(path, weights_only=True))
        except Exception as error:
            print_acc("Failed to load optimizer state", error)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.train_config.lr

    def _loop(self):
        batches = iter(self.data_loader)
        self.lr_scheduler.step(self.step_num)
        for step in range(self.step_num, self.train_config.steps):
            self.step_num = step
            batch_list = []
            for _ in range(self.train_config.gradient_accumulation):
                try:
                    batch_list.append(next(batches))
                except StopIteration:
                    batches = iter(self.data_loader)
                    self.epoch_num += 1
                    batch_list.append(next(batches))
            try:
                self.losses.append(self.hook_train_loop(batch_list)["loss"])
            except RuntimeError as error:
                if "CUDA out of memory" not in str(error):
                    raise
                print_acc("OOM, skipping batch")
            if step != self.start_step and step % self.save_config.save_every == 0:
                self.save(step)
            if step != self.start_step and self.sample_every and step % self.sample_every == 0:
                self.sample(step)
            self.step_num = step + 1
            self.end_step_hook()

    @torch.no_grad()
    def sample(self, step=None, is_first=False):
        torch.rand(3)
        self.drawn_at.append(step)
        if self.ema is not None:
            self.ema.eval()
        for number in range(2):
            self.sd.unet(torch.zeros(1, 4, 32, dtype=torch.bfloat16))
            self.sample_step_hook(number, 2)
        if self.ema is not None:
            self.ema.train()
        self.sd.unet.to("cpu", dtype=torch.bfloat16)

    def get_training_info(self):
        return OrderedDict({"step": self.step_num, "epoch": self.epoch_num})

    def update_training_metadata(self):
        self.add_meta(OrderedDict({"training_info": self.get_training_info()}))

    def save(self, step=None):
        if self.ema is not None:
            self.ema.eval()
        self.update_training_metadata()
        meta = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.meta.items()}
        name = self.job.name if step is None else f"{self.job.name}_{step:09d}"
        self.network.save_weights(os.path.join(self.save_root, f"{name}.safetensors"), torch.float16, meta)
        path = os.path.join(self.save_root, "optimizer.pt")
        try:
            torch.save(self.optimizer.state_dict(), path)
        except Exception:
            print_acc("Could not save optimizer")
        self.clean_up_saves()
        self.post_save_hook(path)
        if self.ema is not None:
            self.ema.train()

    def clean_up_saves(self):
        found = glob.glob(os.path.join(self.save_root, f"{self.job.name}_*.safetensors"))
        for path in sorted(found, key=os.path.getctime)[: -self.save_config.max_step_saves_to_keep]:
            os.remove(path)
