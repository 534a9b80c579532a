"""Simulation of gossip in one process, with hundreds of nodes and a virtual clock.

`schedule` draws when nodes meet, `algorithms` has a unit of each algorithm, `nodes` a node's local steps; `api` runs
the units of a schedule and evaluates the mean model.
"""
