"""Collectives: the interface that methods use, its implementation on mesh axes, and simulated workers.

Imports `_types` and `_jax_compat`. Only this package and `_moments` name a collective of JAX.
"""
