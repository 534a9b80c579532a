"""One module per kind of sink: how its sum of squared per-sample gradients is computed.

Imports `_jax_compat` and the helpers of `_moments`.
"""
