"""Operators with one schema each: a reference, which runs on a CPU, and a GPU kernel behind the same name.

`x.py` has the references, which define the result, and `x_kernel.py` the Triton kernels with their launchers: importing
a module of kernels imports triton, which must not happen before a CUDA tensor needs one (`dispatch`).
In Triton's interpreter (TRITON_INTERPRET=1) launchers take CPU tensors; the tests run every kernel that way.
"""
