"""The core: the protocol of a method, how it becomes an optax transform, and the state and report of that."""
