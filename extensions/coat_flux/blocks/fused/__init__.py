"""The fused FP8 flow: FLUX's blocks as autograd functions that save in FP8 only what cannot be recomputed.

reading.py         what the readers of all block families share
flux1.py           FLUX's double and single blocks, put together from
norm_linears.py    LayerNorm, modulation, linears         keeps x
attention.py       QK norm, rotary embedding, attention   keeps q, k, v, out
gated_linear.py    GELU, linear, gate, residual           keeps what GELU reads, the result for the gate's gradient
linears.py         a frozen linear with LoRA              keeps h = x Aᵀ
compiled.py        a block through torch.compile
chooser.py         which blocks take it
"""
