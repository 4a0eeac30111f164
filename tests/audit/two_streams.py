"""What most programs of the corpus begin with."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()
