"""Wrong: A stash drops a tensor when the step before it has been waited for.
Right: A stash keeps each tensor until the side stream has been waited for."""

from two_streams import main, side, torch

stash = []
before = main.record_event()  # WRONG
for _step in range(6):
    x = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        out = x.clone()
    stash.append((x, side.record_event()))
    del x
    if len(stash) == 3:
        main.wait_event(before)  # WRONG
        before = stash[0][1]  # WRONG
        del stash[0]  # WRONG, BUG: freed-in-use
        oldest, done = stash.pop(0)  # RIGHT
        main.wait_event(done)  # RIGHT
        del oldest  # RIGHT
torch.cuda.synchronize()
