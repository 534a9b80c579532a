"""Keeps pytest out of a script that needs PyTorch."""

collect_ignore = ["data/make_power_sgd.py"]
