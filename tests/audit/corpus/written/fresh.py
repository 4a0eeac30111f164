"""Wrong: Memory is allocated on the main stream and filled on the side stream, whose work may come before the memory's earlier use ends.
Right: Memory is allocated and filled on the side stream."""

from two_streams import side, torch

host = torch.ones(1 << 16)
x = torch.empty(1 << 16, device="cuda")  # WRONG
with torch.cuda.stream(side):
    x = torch.empty(1 << 16, device="cuda")  # RIGHT
    x.copy_(host, non_blocking=True)  # BUG: write-early
torch.cuda.synchronize()
