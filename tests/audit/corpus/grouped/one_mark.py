"""Wrong: One mark where the memory is allocated would protect it in both functions.
Right: One mark where the memory is allocated protects it in both functions."""

from two_streams import main, side, torch


def make():
    x = torch.empty(1 << 12, device="cuda").zero_()
    x.record_stream(side)  # RIGHT
    side.wait_stream(main)
    return x


def copied():
    x = make()
    with torch.cuda.stream(side):
        x.clone()
    del x  # BUG: freed-in-use


def doubled():
    x = make()
    with torch.cuda.stream(side):
        x.repeat(2)
    del x


for _ in range(3):
    copied()
    doubled()
torch.cuda.synchronize()
