"""Collectives: the interface that methods use, its implementation on mesh axes, and simulated workers.

Only this package names a collective of JAX.
"""
