"""Wrong: The storage is resized to nothing while a copy to the host runs.
Right: The storage is resized to nothing after the copy's event was waited for."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda").zero_()
host = torch.empty(1 << 16)
side.wait_stream(main)
with torch.cuda.stream(side):
    host.copy_(x, non_blocking=True)
    copied = side.record_event()  # RIGHT
main.wait_event(copied)  # RIGHT
x.untyped_storage().resize_(0)  # BUG: freed-in-use
y = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
