"""A stash keeps each tensor until the side stream has been waited for."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

stash = []
for _step in range(6):
    x = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        out = x.clone()
    stash.append((x, side.record_event()))
    del x
    if len(stash) == 3:
        oldest, done = stash.pop(0)
        main.wait_event(done)
        del oldest
torch.cuda.synchronize()
