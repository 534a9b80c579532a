"""Time per step over slow links: gcjax in several processes, beside PyTorch DDP and its hooks. Linux, root."""
