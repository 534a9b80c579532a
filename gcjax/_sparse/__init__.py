"""Sparse messages: value codes, slots, selection of entries, the exchange, and the state of a sparse method."""
