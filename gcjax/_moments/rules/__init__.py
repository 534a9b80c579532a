"""The nodes between a gradient and its operands, one module per kind: how each makes its sums over samples.

`rules.node` imports `_jax_compat` and `_moments.jaxprs`; the other modules also import `rules.node`. `dense.product` is
shared with `conv`.
"""
