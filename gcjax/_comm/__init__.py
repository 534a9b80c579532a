"""Collectives: the interface that methods use, its implementation on mesh axes, and simulated workers.

Imports `_types` and `_jax_compat`. Only this package names a collective of JAX.
"""
