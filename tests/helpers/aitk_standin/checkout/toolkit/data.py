"""Data sets as ai-toolkit groups them: shuffled into batches while loading, shuffled anew in each epoch."""

import json
import os
import random
from types import SimpleNamespace

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset


class FolderDataset(Dataset):
    def __init__(self, config, batch_size):
        self.dataset_config = config
        folder = config.dataset_path or config.folder_path
        kinds = (".png", ".jpg", ".mp4") if config.num_frames > 1 else (".png", ".jpg")
        if os.path.isdir(folder):
            names = sorted(name for name in os.listdir(folder) if name.endswith(kinds))
        else:
            with open(folder) as file:
                names = list(json.load(file))
        assert names, f"no images found in {folder}"
        self.file_list = [SimpleNamespace(path=os.path.join(folder, name)) for name in names]
        order = list(range(len(names)))
        random.shuffle(order)
        self.batch_indices = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    def __len__(self):
        return len(self.batch_indices)

    def __getitem__(self, index):
        photos = [torch.full((8, 32), photo / 10) for photo in self.batch_indices[index]]
        return torch.stack(photos) * (random.random() > 0.3)  # a dropped caption, say


def get_dataloader_from_datasets(configs, batch_size):
    workers = configs[0].num_workers
    kept = {"prefetch_factor": 2, "persistent_workers": True} if workers else {}
    data = ConcatDataset([FolderDataset(config, batch_size) for config in configs])
    return DataLoader(data, batch_size=None, shuffle=True, num_workers=workers, **kept)
