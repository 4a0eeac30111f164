"""Wrong: The event that the reader waits for was recorded before the copy.
Right: The event that the reader waits for was recorded after the copy."""

from two_streams import main, side, torch

host = torch.ones(1 << 16)
ready = torch.cuda.Event()
with torch.cuda.stream(side):
    x = torch.empty(1 << 16, device="cuda")
    x.copy_(host, non_blocking=True)  # RIGHT
    ready.record()
    x.copy_(host, non_blocking=True)  # WRONG
main.wait_event(ready)
y = x.clone()  # BUG: read-early
torch.cuda.synchronize()
