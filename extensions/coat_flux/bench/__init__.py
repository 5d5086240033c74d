"""The benchmark harness behind `coat-flux bench`: COAT and its rivals at FLUX.1-dev's geometry with random weights."""
