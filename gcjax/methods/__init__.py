"""One file per method: a state, and a factory that makes a `Compressor` and hands it to `gcjax.compress`.

A new method touches its file here, its row in `tests/methods_table.py`, its export in `gcjax/__init__.py` and its row
in the README; tests compare these lists and run every law on the row.
"""
