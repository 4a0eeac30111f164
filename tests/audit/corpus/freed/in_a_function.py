"""Wrong: A function uses its argument on a stream of its own, and the caller drops it.
Right: A function uses its argument on a stream of its own, and waits for that on the host."""

from two_streams import side, torch


def offload(x, host):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    side.synchronize()  # RIGHT


host = torch.empty(1 << 16)
x = torch.empty(1 << 16, device="cuda").zero_()
offload(x, host)
x = torch.empty(1 << 15, device="cuda").zero_()  # BUG: freed-in-use
y = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
