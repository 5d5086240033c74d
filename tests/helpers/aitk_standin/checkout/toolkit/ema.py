import torch


class ExponentialMovingAverage:
    def __init__(self, params, decay):
        self.params, self.decay = list(params), decay
        self.shadow_params = [p.detach().clone() for p in self.params]
        self.raw = None

    @torch.no_grad()
    def update(self):
        for average, p in zip(self.shadow_params, self.params, strict=True):
            average.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def eval(self):
        if self.raw is not None:
            return
        self.raw = [p.detach().clone() for p in self.params]
        for average, p in zip(self.shadow_params, self.params, strict=True):
            p.copy_(average)

    @torch.no_grad()
    def train(self):
        if self.raw is None:
            return
        for raw, p in zip(self.raw, self.params, strict=True):
            p.copy_(raw)
        self.raw = None
