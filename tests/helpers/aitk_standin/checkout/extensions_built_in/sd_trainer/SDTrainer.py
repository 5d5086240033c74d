import torch
from jobs.process import BaseSDTrainProcess


class SDTrainer(BaseSDTrainProcess):
    def predict_noise(self, noisy_latents, is_primary_pred=False):
        return self.sd.unet(noisy_latents).float()

    def calculate_loss(self, noise_pred, noise):
        return (noise_pred - noise).square().mean()

    get_guided_loss = get_mean_flow_loss = calculate_loss

    def train_single_accumulation(self, batch):
        raise NotImplementedError

    def hook_train_loop(self, batch_list):
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batch_list:
            noisy = (batch + torch.randn(batch.shape)).to(torch.bfloat16)
            noise_pred = self.predict_noise(noisy_latents=noisy, is_primary_pred=True)
            loss = self.calculate_loss(noise_pred=noise_pred, noise=1.0)
            if not torch.isfinite(loss):
                loss = torch.zeros_like(loss).requires_grad_(True)
            self.accelerator.backward(loss)
            total += loss.item()
        self.accelerator.clip_grad_norm_(self.network.parameters(), self.train_config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        self.lr_scheduler.step()
        return {"loss": total / len(batch_list)}
