"""Wrong: A thread fills a tensor on its own stream, and its end is taken for the end of the copy.
Right: A thread fills a tensor on its own stream, and waits for that before it ends."""

import threading

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda")
side.wait_stream(main)


def fill():
    with torch.cuda.stream(side):
        x.zero_()
    side.synchronize()  # RIGHT


thread = threading.Thread(target=fill)
thread.start()
thread.join()
y = x.clone()  # BUG: read-early
torch.cuda.synchronize()
