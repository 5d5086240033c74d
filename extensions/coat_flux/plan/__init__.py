"""`coat-flux plan`: memory, disk and time of a job before it runs, without a download."""

from .predict import PhasePrediction, Prediction, predict

__all__ = ["PhasePrediction", "Prediction", "predict"]
