"""Simulation of asynchronous gossip with a virtual clock."""
