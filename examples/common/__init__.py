"""What the training examples share: options, data, networks, the training loop, processes."""
