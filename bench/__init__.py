"""Benchmarks: `python -m bench.NAME` in the root of the repository; see README.md."""
