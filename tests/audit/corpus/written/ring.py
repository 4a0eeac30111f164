"""Wrong: A ring of two buffers is filled again before its last reader is waited for.
Right: A ring of two buffers: each is filled again after its last reader."""

from two_streams import main, side, torch

buffers = [torch.empty(1 << 16, device="cuda") for _ in range(2)]
side.wait_stream(main)  # WRONG
read = [main.record_event() for _ in range(2)]  # RIGHT
host = torch.ones(1 << 16)
for step in range(6):
    buffer = buffers[step % 2]
    side.wait_event(read[step % 2])  # RIGHT
    with torch.cuda.stream(side):
        buffer.copy_(host, non_blocking=True)  # BUG: write-early
    main.wait_stream(side)
    out = buffer.clone()
    read[step % 2] = main.record_event()  # RIGHT
torch.cuda.synchronize()
