"""Arrays without collectives: floats, bits, hashing, buckets, groups, chunks and matrices.

`buckets` lays the leaves of a pytree out in one array; most other modules work on such arrays.
"""
