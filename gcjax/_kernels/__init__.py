"""Array code without collectives: bit packing, hashing, buckets, reductions over segments, small matrices.

Imports only `_types`, `_validation` and `_jax_compat`.
"""
