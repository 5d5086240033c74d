import torch


def get_optimizer(params, optimizer_type="adam", learning_rate=1e-6, optimizer_params=None):
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if optimizer_type.lower() not in kinds:
        raise ValueError(f"Unknown optimizer type {optimizer_type}")
    return kinds[optimizer_type.lower()](params, lr=learning_rate, **(optimizer_params or {}))
