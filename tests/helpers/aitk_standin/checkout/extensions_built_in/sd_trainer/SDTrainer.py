from jobs.process import BaseSDTrainProcess


class SDTrainer(BaseSDTrainProcess):
    def hook_train_loop(self, batch_list):
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batch_list:
            loss = (self.sd.unet(batch).float() - 1.0).square().mean()
            self.accelerator.backward(loss)
            total += loss.item()
        self.optimizer.step()
        return {"loss": total / len(batch_list)}
