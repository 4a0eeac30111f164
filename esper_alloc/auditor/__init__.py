"""Finds accesses to GPU memory that nothing orders: ``esper_alloc.audit()``."""
