"""The benchmark harness behind `coat-flux bench`: COAT and its rivals at FLUX.1-dev's geometry with random weights.

configurations   what is compared: one table
flops            how much arithmetic a forward pass and a training step are
limits           how fast this device could do it
models, levels   what one process builds and times
worker           that process
runner           the processes, in interleaved rounds
gate             the tests that must pass first
summary, report  medians, spread, share of the limit; JSON, Markdown, picture
"""
