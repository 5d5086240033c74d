from .BaseSDTrainProcess import BaseSDTrainProcess

__all__ = ["BaseSDTrainProcess"]
