"""`python -m bench.network`."""

from bench.network.cli import main

main()
