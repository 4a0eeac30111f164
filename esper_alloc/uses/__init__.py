"""Marks and scopes, which tell the allocator where memory is used, eager and compiled."""
