"""LoRA by swapping `forward` of linears found by class name; the adapter casts its own copy of x to fp32."""

import weakref

import torch
from safetensors.torch import load_file, save_file
from torch import nn

LINEAR_MODULES = ["Linear", "OstrisLinear"]


class LoRAModule(nn.Module):
    scale = 1.0
    dropout = rank_dropout = module_dropout = None

    def __init__(self, lora_name, org_module, rank, network):
        super().__init__()
        self.lora_name = lora_name
        self.lora_down = nn.Linear(org_module.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, org_module.out_features, bias=False)
        self.orig_module_ref = weakref.ref(org_module)
        self.org_module = [org_module]
        self.network_ref = weakref.ref(network)
        nn.init.zeros_(self.lora_up.weight)

    def apply_to(self):
        self.org_forward = self.org_module[0].forward
        self.org_module[0].forward = self.forward

    def forward(self, x):
        base = self.org_forward(x)
        return base + self._call_forward(x.to(self.lora_down.weight.dtype)).to(base.dtype)

    def _call_forward(self, x):
        return self.lora_up(self.lora_down(x))


class LoRASpecialNetwork(nn.Module):
    is_active = True
    is_merged_in = is_lorm = False
    multiplier = _multiplier = 1.0
    torch_multiplier = None

    def __init__(self, unet, rank, only_if_contains=("",)):
        super().__init__()
        self.can_merge_in = True
        self.did_change_weights = False
        self.unet_loras = nn.ModuleList(
            LoRAModule(f"transformer.{name}".replace(".", "$$"), module, rank, self)
            for name, module in unet.named_modules()
            if type(module).__name__ in LINEAR_MODULES and any(part in name for part in only_if_contains)
        )
        for lora in self.unet_loras:
            lora.apply_to()

    def save_weights(self, file, dtype, metadata):
        names = {".lora_down.": ".lora_A.", ".lora_up.": ".lora_B."}
        tensors = {}
        for lora in self.unet_loras:
            for ours, theirs in names.items():
                weight = lora.get_parameter(f"{ours[1:]}weight")
                tensors[f"{lora.lora_name.replace('$$', '.')}{theirs}weight"] = weight.detach().to(dtype).contiguous()
        save_file(tensors, file, metadata)

    def load_weights(self, file):
        saved = load_file(file)
        for lora in self.unet_loras:
            name = lora.lora_name.replace("$$", ".")
            lora.lora_down.weight.data.copy_(saved[f"{name}.lora_A.weight"])
            lora.lora_up.weight.data.copy_(saved[f"{name}.lora_B.weight"])

    def force_to(self, dtype):
        self.to(torch.device("cpu"), dtype)
