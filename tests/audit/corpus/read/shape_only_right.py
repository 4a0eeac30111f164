"""The side stream only asks for the shape, type and device of what the main stream writes."""

from two_streams import side, torch

x = torch.empty(1 << 16, device="cuda").zero_()
with torch.cuda.stream(side):
    y = torch.empty(1, device="cuda").zero_().expand_as(x)
    z = torch.empty(1 << 8, 1 << 8, device="cuda").zero_()
    z = z.reshape_as(x).view_as(x).type_as(x).to(x)
torch.cuda.synchronize()
