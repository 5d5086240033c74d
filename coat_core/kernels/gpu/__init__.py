"""Triton kernels and their launchers, one module for each module of operators; imported when a CUDA tensor needs them.

In Triton's interpreter (TRITON_INTERPRET=1) the launchers take CPU tensors: the tests run every kernel so.
"""
