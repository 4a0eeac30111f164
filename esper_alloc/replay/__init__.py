"""Recorded memory histories: read, checked, and run through the core without PyTorch."""
