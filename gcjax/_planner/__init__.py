"""Predicts how long a step takes with each method on a given network."""
