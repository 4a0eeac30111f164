"""Wrong: Batches go through static tensors. Neither the copies wait for the reset, nor it for the readers.
Right: Batches go through static tensors. The copies wait for the reset, and it for the readers."""

import torch

main, copies, compute = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
SIZE = 1 << 12
host = torch.ones(SIZE)


class Inputs:
    def __init__(self):
        self.ids, self.places, self.lengths, self.mask = torch.empty(4, SIZE, device="cuda")
        self.table = torch.empty(SIZE, device="cuda")
        self.written = torch.empty(SIZE, device="cuda")
        self.read = torch.empty(SIZE, device="cuda")
        self.outputs = torch.empty(2, SIZE, device="cuda")

    def reset(self):
        main.wait_stream(compute)  # RIGHT
        self.ids.zero_()  # BUG: write-early
        self.places.zero_()
        self.lengths.zero_()
        self.mask.fill_(-1)
        self.outputs[0].zero_()
        self.outputs[1].zero_()
        self.table.fill_(-1)
        self.written.fill_(0)
        self.read.fill_(0)

    def send(self, first):
        copies.wait_stream(compute)
        copies.wait_stream(main)  # RIGHT
        with torch.cuda.stream(copies):
            if first:
                self.table.copy_(host, non_blocking=True)  # BUG: write-early
            self.ids.copy_(host, non_blocking=True)
            self.places.copy_(host, non_blocking=True)
            self.lengths.copy_(host, non_blocking=True)
            self.mask.copy_(host, non_blocking=True)
            self.written.copy_(host, non_blocking=True)
            self.read.copy_(host, non_blocking=True)

    def run(self):
        compute.wait_stream(copies)
        with torch.cuda.stream(compute):
            self.outputs[0].copy_(self.ids)
            self.outputs[0].copy_(self.places)
            self.outputs[0].copy_(self.lengths)
            self.outputs[1].copy_(self.mask)
            self.outputs[1].copy_(self.table)
            self.outputs[1].copy_(self.written)
            self.outputs[1].copy_(self.read)


def session(inputs):
    inputs.reset()
    for step in range(3):
        inputs.send(step == 0)
        inputs.run()


inputs = Inputs()
session(inputs)
for _ in range(2):
    session(inputs)
torch.cuda.synchronize()
