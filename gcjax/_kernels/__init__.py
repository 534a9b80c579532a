"""Array code without collectives: floats, bit packing, hashing, buckets, reductions over segments, matrices.

Imports only `_types`, `_validation` and `_jax_compat`.
"""
