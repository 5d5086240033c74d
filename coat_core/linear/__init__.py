"""FP8 linear layers: the function, the modules, and conversion of whole models."""
