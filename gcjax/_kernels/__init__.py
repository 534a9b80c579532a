"""Arrays without collectives: floats, bits, hashing, buckets, groups, chunks and matrices.

`buckets` says how the leaves of a pytree lie in one array; most other modules work on such arrays.
"""
