"""Simulation of asynchronous gossip with a virtual clock, in one process.

`api` has `simulate`, its options and its result. `nodes` has a node's local steps, and `Simulation`, which can be
advanced one event or round at a time. `events` makes simulations of pairs that meet (SwarmSGD, AD-PSGD), at times that
`clocks` draws; `rounds` makes simulations of algorithms in lockstep (D-PSGD, SGP, local SGD, large-batch SGD).
"""
