"""Outputs of CUDA graphs that outlive the next run: :class:`cudagraph_outputs`."""
