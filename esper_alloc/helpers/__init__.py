"""Helpers for training loops that keep to the rules of uses, each by itself.

They work with any allocator, and on the CPU.
"""
