"""Copies batches to the GPU one step ahead, and drops each right after its last read.

    python examples/prefetch.py                  # on esper_alloc
    python examples/prefetch.py --native         # on PyTorch's own allocator

A batch is allocated on the copy stream and read on the compute stream, which the
allocator does not see. `record_use` tells it where the last read is. Under another
allocator the same line falls back to `record_stream`: compare the memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

import torch

import esper_alloc

ROWS, COLUMNS = 4096, 4096  # of float32: 64 MiB a batch


def prefetch(batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The batches, which lie in pinned CPU memory, on the GPU."""
    copies, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    source = iter(batches)

    def fetch() -> torch.Tensor | None:
        batch = next(source, None)
        with torch.cuda.stream(copies):  # so the memory belongs to the copy stream
            return None if batch is None else batch.to("cuda", non_blocking=True)

    ahead = fetch()
    while ahead is not None:
        compute.wait_stream(copies)  # order: the copy comes before the first read
        batch, ahead = ahead, fetch()
        yield batch
        # The consumer is back for more, so its last read of this batch has been
        # enqueued, a backward pass included. This is the place for the mark: from
        # here on the batch may be dropped, on any stream and at any time.
        with torch.no_grad():
            esper_alloc.record_use(batch, compute)
        del batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--native", action="store_true", help="PyTorch's own allocator")
    parser.add_argument("--batches", type=int, default=32, help="how many (default: 32)")
    options = parser.parse_args()
    if options.batches < 1:
        parser.error("--batches must be at least 1")
    if not torch.cuda.is_available():
        raise SystemExit("this example needs an NVIDIA GPU")
    if not options.native:
        esper_alloc.enable()  # before anything touches the GPU

    # Batch i is full of the number i, so that a wrong read shows.
    host = [torch.full((ROWS, COLUMNS), float(i)).pin_memory() for i in range(4)]
    weight = torch.eye(COLUMNS, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    weight @ weight  # the first product loads its kernels and allocates
    torch.cuda.synchronize()
    base = torch.cuda.memory_reserved()

    for i, batch in enumerate(prefetch(host[i % 4] for i in range(options.batches))):
        y = batch
        for _ in range(4):  # some work, so that the GPU falls behind the host
            y = y @ weight
        wrong += (y != i % 4).sum() + (batch != i % 4).sum()
    del y, batch

    grown = (torch.cuda.max_memory_reserved() - base) >> 20
    print(f"{options.batches} batches of {ROWS * COLUMNS >> 18} MiB: {grown} MiB reserved for them")
    print(f"{wrong.item()} elements were read wrong")


if __name__ == "__main__":
    main()
