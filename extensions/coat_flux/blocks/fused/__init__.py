"""The fused FP8 flow: a block with a reader is one autograd function that saves in FP8 only what cannot be recomputed.

chooser.py         which blocks take it, and when they are read again
reading.py         what the readers of all block families share; the readers: ../models/
double_block.py    a double block, forward and backward, and
single_block.py    a single one, and
stream_block.py    one with norms after its linears, of any model, put together from
parts.py           norm and linears, attention, a linear with its gate
linears.py         linears that read the same x, with LoRA; their frozen weights as one matrix
modulation.py      adaLN's vectors of all blocks, made where a pass begins
block.py           the autograd function, what it saves and in which format, which gradients it writes
"""
