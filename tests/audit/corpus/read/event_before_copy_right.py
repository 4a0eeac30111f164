"""The event that the reader waits for was recorded after the copy."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

host = torch.ones(1 << 16)
ready = torch.cuda.Event()
with torch.cuda.stream(side):
    x = torch.empty(1 << 16, device="cuda")
    x.copy_(host, non_blocking=True)
    ready.record()
main.wait_event(ready)
y = x.clone()
torch.cuda.synchronize()
