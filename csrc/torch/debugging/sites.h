// Places in the Python program, as numbers: where an operator was called, memory allocated or
// freed.
#pragma once

#include <torch/csrc/python_headers.h>

#include <cstdint>
#include <string>
#include <vector>

namespace esper::sites
{

// The place that the calling thread is at, the user's frames first. 0: it runs no Python code.
// Takes the GIL, so no lock may be held that somebody with the GIL waits for.
uint32_t here();

// The place of the forward operator whose backward node the thread runs, if that was told. 0: none.
uint32_t of_backward();
// here() or, if that is unknown, of_backward().
uint32_t now();
// The operator that starts now, at `site`, makes the node of that sequence number.
void note_forward(int64_t sequence_number, uint32_t site);

// For the black box: the kind of the autograd node that this thread executes.
int current_node(uint64_t *hash, char *name, size_t size);

// Files in these folders are not the user's. Needs the GIL.
void set_foreign_folders(std::vector<std::string> folders);

// A tuple: whether it is in backward, then for each frame (file, line, function), the user's frames
// first. A new reference, or null with a Python exception. Needs the GIL.
PyObject *describe(uint32_t site);

} // namespace esper::sites
