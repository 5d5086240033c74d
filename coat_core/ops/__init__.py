"""Operators with one schema each: a reference, which a CPU runs, and a GPU kernel behind the same name.

`x.py` has the references of a family, which say what is computed, and `x_kernel.py` its Triton kernels with their
launchers. They are two files because `triton.jit` reads a function's source and the globals of its module: a module of
kernels imports triton when it is imported, which must not happen before a CUDA tensor needs one (`dispatch`).

In Triton's interpreter (TRITON_INTERPRET=1) the launchers take CPU tensors: the tests run every kernel so.
"""

FAMILIES = (  # the modules of operators
    "adamw",
    "attention",
    "gate",
    "gelu",
    "int8",
    "mlp_down",
    "lora",
    "mlp_gradient",
    "norm",
    "nvfp4",
    "qkv",
    "quantize",
    "scaled_mm",
    "weight_only",
)
