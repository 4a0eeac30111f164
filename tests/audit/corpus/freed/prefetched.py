"""Wrong: A loop prefetches on a copy stream, and the batch is replaced without a mark.
Right: A loop prefetches on a copy stream, and marks each batch with record_stream."""

import torch

copies, main = torch.cuda.Stream(), torch.cuda.current_stream()
hosts = [torch.full((1 << 16,), float(i)) for i in range(6)]


def load(host):
    with torch.cuda.stream(copies):
        return host.to("cuda", non_blocking=True)


total = torch.zeros(1 << 16, device="cuda")
batch = load(hosts[0])
for host in hosts[1:]:
    main.wait_stream(copies)
    total.copy_(batch)
    batch.record_stream(main)  # RIGHT
    batch = load(host)  # BUG: freed-in-use
main.wait_stream(copies)
torch.cuda.synchronize()
