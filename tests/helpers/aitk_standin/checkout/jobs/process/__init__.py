from .BaseSDTrainProcess import BaseSDTrainProcess
from .TrainVAEProcess import TrainVAEProcess

__all__ = ["BaseSDTrainProcess", "TrainVAEProcess"]
