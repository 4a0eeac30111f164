"""A Triton kernel that is launched by hand."""

import triton
import triton.language as tl


@triton.jit
def double(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at))
