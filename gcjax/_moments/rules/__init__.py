"""The nodes between a gradient and its operands, one module per kind: how each makes its sums over samples."""
