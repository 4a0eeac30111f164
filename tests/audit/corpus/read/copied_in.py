"""Wrong: A batch is copied in on the side stream, and used before the copy is waited for.
Right: A batch is copied in on the side stream; the copy to the device waits on the host."""

from two_streams import side, torch

host = torch.ones(1 << 16)
with torch.cuda.stream(side):
    x = host.to("cuda", non_blocking=True)  # WRONG
    x = host.to("cuda")  # RIGHT
y = x.clone()  # BUG: read-early
torch.cuda.synchronize()
