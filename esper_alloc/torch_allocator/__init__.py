"""Putting PyTorch on esper_alloc, and what the allocator says about itself."""
