"""The stand-alone trainer: `trainer.COATTrainer` (needs diffusers, peft and accelerate)."""
