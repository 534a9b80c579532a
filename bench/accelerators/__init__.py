"""Training steps compiled for TPUs and GPUs that this machine does not have, and what their programs cost."""
