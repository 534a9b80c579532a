"""One file per method; each makes a `Compressor` and its optax transform."""
