"""Wrong: A weight's data is replaced while the side stream still copies the old one.
Right: A weight's data is replaced after the host has seen that the copy is done."""

from two_streams import main, side, torch

weight = torch.nn.Parameter(torch.empty(1 << 16, device="cuda").zero_())
host = torch.empty(1 << 16)
side.wait_stream(main)
with torch.cuda.stream(side), torch.no_grad():
    host.copy_(weight, non_blocking=True)
done = side.record_event()  # RIGHT
if not done.query():  # RIGHT
    done.synchronize()  # RIGHT
weight.data = torch.empty(1 << 16, device="cuda")  # BUG: freed-in-use
weight.data.zero_()
y = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
