"""The order of a sharded layer's gathering: the next buffer is gathered after the streams that used the last one."""

import torch

gathering, main = torch.cuda.Stream(), torch.cuda.current_stream()
shard = torch.empty(1 << 14, device="cuda").zero_()
torch.cuda.synchronize()
last = None
for _layer in range(5):
    if last is not None:
        buffer, used = last
        gathering.wait_event(used)
        last = buffer = None
    with torch.cuda.stream(gathering):
        buffer = torch.empty(4, 1 << 14, device="cuda")
        for piece in buffer:
            piece.copy_(shard)
        gathered = gathering.record_event()
    main.wait_event(gathered)
    weight = buffer.clone()
    last = buffer, main.record_event()
torch.cuda.synchronize()
