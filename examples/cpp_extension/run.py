"""Builds the C++ extension beside this file, and lets it read tensors that are gone.

    python examples/cpp_extension/run.py
    python examples/cpp_extension/run.py --build    # only compiles; needs no GPU

Needs a C++ compiler, ninja and the CUDA toolkit's headers, as every extension of
PyTorch does.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

import esper_alloc

SIZE = 1 << 24  # of float32: 64 MiB


def build(folder: Path | None = None) -> ModuleType:
    """Compiles the extension, unless that was done before, and imports it."""
    if not torch.cuda.is_available():
        # PyTorch asks the GPU for its architecture. There is no kernel to build for it.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    return cpp_extension.load(
        name="esper_alloc_example",
        sources=[str(Path(__file__).with_name("download.cpp"))],
        # All that an extension needs to know of esper_alloc:
        extra_include_paths=[esper_alloc.get_include()],
        extra_ldflags=[esper_alloc.library_path()],
        with_cuda=True,  # CUDA's headers and runtime; there is no kernel to compile
        build_directory=None if folder is None else str(folder),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true", help="only compile and import")
    parser.add_argument("--folder", type=Path, help="where to build (default: PyTorch's place)")
    options = parser.parse_args()
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: there is no such folder")
    if not options.build and not torch.cuda.is_available():
        raise SystemExit("this example needs an NVIDIA GPU; --build only compiles")
    if options.build:
        print(f"built {build(options.folder).__file__}")
        return

    esper_alloc.enable()  # before anything touches the GPU, as building does
    extension = build(options.folder)
    side = torch.cuda.Stream()
    copies = []
    for i in range(16):
        x = torch.full((SIZE,), float(i), device="cuda")
        copies.append(extension.download(x, side.cuda_stream))
        del x  # the next one gets its memory, and waits for the copy on the GPU
    side.synchronize()
    wrong = sum(int((copy != i).sum()) for i, copy in enumerate(copies))
    reserved = torch.cuda.max_memory_reserved() >> 20
    print(f"16 tensors of {SIZE >> 18} MiB, {reserved} MiB reserved: {wrong} elements wrong")


if __name__ == "__main__":
    main()
