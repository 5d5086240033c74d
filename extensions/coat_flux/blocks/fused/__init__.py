"""The fused FP8 flow: a block with a reader is one autograd function that saves in FP8 only what cannot be recomputed.

reading.py         what the readers of all block families share
../models/         a reader per family of models
double_block.py    a double block, forward and backward, and
single_block.py    a single one, and
stream_block.py    one with norms after its linears, of any model, put together from
norm_linears.py    norm, modulation, linears              keeps x
attention.py       QK norm, rotary embedding, attention   keeps q, k, v; out is kept by who reads it
gated_linear.py    a linear, its gate and the residual    keeps the linear's result for the gate's gradient
linears.py         linears that read the same x, LoRA     keeps h = x Aᵀ
frozen.py          their frozen weights, as one matrix
modulation.py      adaLN's vectors of all blocks, made where a pass begins
block.py           the autograd function
kept.py            what it keeps, and in which format
chooser.py         which blocks take it
"""
