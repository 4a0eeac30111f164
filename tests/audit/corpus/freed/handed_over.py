"""Wrong: A producer hands tensors over with an event, and the consumer drops them when it has enqueued its work.
Right: A producer hands tensors over with an event, and the consumer marks them before it drops them."""

from two_streams import main, side, torch

queue = []
for _ in range(4):
    x = torch.empty(1 << 16, device="cuda").zero_()
    queue.append((x, main.record_event()))
    del x
while queue:
    x, ready = queue.pop()
    side.wait_event(ready)
    with torch.cuda.stream(side):
        y = x.clone()
    x.record_stream(side)  # RIGHT
    del x  # BUG: freed-in-use
y = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
