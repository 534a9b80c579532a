"""The core: what a compressor is, how it becomes an optax transform, and what its state says.

Imports `_kernels` and `_comm`.
"""
