"""Batches for many environments at once, gathered on the devices.

The data set lies on each device once. A batch is gathered there by index, on
CUDA by one kernel for the inputs and targets of all environments, into memory
that belongs to each environment alone. Who gets which samples is in `plan`,
what happens to them on the way in `transform`.

The modules here import torch where it is there. Their names are there without
it, and whoever calls them is told.
"""
