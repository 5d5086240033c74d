"""The benchmark harness behind `coat-flux bench`: COAT and its rivals at FLUX.1-dev's geometry with random weights.

configurations   what is compared, at which sizes: one table
limits           how much arithmetic a step is, and how fast this device could do it
measure          the model or optimizer of a process, and its steps
timing           how a call is timed
worker           that process
runner           the tests that must pass first, then the processes in interleaved rounds
report           medians, spread, share of the limit; JSON and Markdown
count            launches, bytes and operations of what runs on the meta device: `--level count`
counted_step     a whole training step, run so
step_model       what a step's launches would take on known cards; count.json
"""
