from extensions_built_in.sd_trainer.SDTrainer import SDTrainer


class DiffusionTrainer(SDTrainer):
    pass
