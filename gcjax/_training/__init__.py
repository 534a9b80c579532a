"""The data-parallel training step, state on a mesh, and the check that all processes run the same program.

Imports everything but `_planner` and `gossip`.
"""
