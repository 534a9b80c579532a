"""Predicts how long a step takes with each method on a given network.

Imports `_comm` and `methods`.
"""
