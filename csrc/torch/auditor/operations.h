// What the operators of PyTorch's do with their arguments, by their schemas.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

namespace esper
{

enum class Argument : uint8_t {
  none,  // only looked at: a view is made of it, or its shape is read
  read,  //
  write, // perhaps read, too
};

struct Operation {
  static constexpr size_t known = 64; // arguments; those beyond are read
  std::string name;                   // with the name space
  uint32_t number;                    // in the order of discovery, from 1
  bool is_record_stream;
  bool makes_views;
  bool writes_what_it_allocates; // itself, not by operators that it calls
  bool may_run_python;           // it is none of PyTorch's own
  Argument arguments[known];

  Argument argument(size_t index) const
  {
    return index < known ? arguments[index] : Argument::read;
  }
};

// The operator that starts. Null: the function is none (an autograd node, a user's range). Lives as
// long as the process.
const Operation *find_operation(const at::RecordFunction &function);

// The operator of that number, or an empty name.
std::string operation_name(uint32_t number);
// A number for something that is no operator, such as a replay. `name` is a literal.
uint32_t operation_number(const char *name);

} // namespace esper
