"""A ring of two buffers is filled again before its last reader is waited for."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

buffers = [torch.empty(1 << 16, device="cuda") for _ in range(2)]
side.wait_stream(main)
host = torch.ones(1 << 16)
for step in range(6):
    buffer = buffers[step % 2]
    with torch.cuda.stream(side):
        buffer.copy_(host, non_blocking=True)  # BUG: write-early
    main.wait_stream(side)
    out = buffer.clone()
torch.cuda.synchronize()
