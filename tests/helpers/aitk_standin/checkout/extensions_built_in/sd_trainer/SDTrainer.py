import torch
from jobs.process import BaseSDTrainProcess
from version import IS_NEWER


class SDTrainer(BaseSDTrainProcess):
    def predict_noise(self, noisy_latents, is_primary_pred=False):
        return self.sd.unet(noisy_latents).float()

    def calculate_loss(self, noise_pred, noise):
        return (noise_pred - noise).square().mean()

    get_guided_loss = get_mean_flow_loss = calculate_loss

    def _accumulate(self, batch, accum_scale=1.0):
        noisy = (batch + torch.randn(batch.shape)).to(torch.bfloat16)
        noise_pred = self.predict_noise(noisy_latents=noisy, is_primary_pred=True)
        loss = self.calculate_loss(noise_pred=noise_pred, noise=1.0)
        if not torch.isfinite(loss):
            loss = torch.zeros_like(loss).requires_grad_(True)
        self.accelerator.backward(loss * accum_scale)
        return loss.detach()

    if IS_NEWER:

        def train_single_accumulation(self, batch, accum_scale=1.0):
            return self._accumulate(batch, accum_scale)

    else:

        def train_single_accumulation(self, batch):
            return self._accumulate(batch)

    def hook_train_loop(self, batch_list):
        self.optimizer.zero_grad()
        total = 0.0
        scale = {"accum_scale": 1 / len(batch_list)} if IS_NEWER else {}
        for batch in batch_list:
            total += self.train_single_accumulation(batch, **scale).item()
        self.accelerator.clip_grad_norm_(self.network.parameters(), self.train_config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        self.lr_scheduler.step()
        return {"loss": total / len(batch_list)}
