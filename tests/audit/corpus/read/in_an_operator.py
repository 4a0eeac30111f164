"""Wrong: An operator that is written in Python reads on the side stream without waiting.
Right: An operator that is written in Python reads on the side stream after it has waited."""

from two_streams import main, side, torch


@torch.library.custom_op("corpus_wrong::twice", mutates_args=())  # WRONG
@torch.library.custom_op("corpus_right::twice", mutates_args=())  # RIGHT
def twice(x: torch.Tensor) -> torch.Tensor:
    y = torch.mul(x, 2.0)
    z = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)  # RIGHT
    with torch.cuda.stream(side):
        z.clone()  # BUG: read-early
    main.wait_stream(side)
    return y


x = torch.empty(1 << 16, device="cuda").zero_()
y = twice(x)
torch.cuda.synchronize()
