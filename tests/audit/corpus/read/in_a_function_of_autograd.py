"""Wrong: The forward of an autograd.Function reads on the side stream without waiting.
Right: The forward of an autograd.Function reads on the side stream after it has waited."""

from two_streams import main, side, torch


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.mul(x, 2.0)
        z = torch.empty(1 << 16, device="cuda").zero_()
        side.wait_stream(main)  # RIGHT
        with torch.cuda.stream(side):
            z.clone()  # BUG: read-early
        main.wait_stream(side)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient


x = torch.empty(1 << 16, device="cuda").zero_().requires_grad_()
y = Twice.apply(x)
torch.cuda.synchronize()
