#include "operations.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace esper
{

namespace
{

struct Book {
  std::shared_mutex mutex;
  // By where the operator's registration has its name, which is as good as the operator and quicker
  // to look up.
  std::unordered_map<const char *, const Operation *> by_name;
  std::vector<const Operation *> all;
};

Book &book()
{
  static auto *instance = new Book();
  return *instance;
}

bool begins_with(std::string_view text, std::string_view with)
{
  return text.substr(0, with.size()) == with;
}

bool ends_with(std::string_view text, std::string_view with)
{
  return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
}

// Operators that look at shapes, flags or storages, not at contents.
bool touches_nothing(std::string_view name, const c10::OperatorName &operator_name)
{
  static constexpr std::string_view names =
      " requires_grad_ retain_grad set_data is_pinned result_type can_cast is_set_to "
      "is_same_size resize_ _resize_output_ set_ resize_as_ record_stream _version "
      "output_nr is_leaf broadcast_tensors expand_as view_as reshape_as "
      "_assert_tensor_metadata _has_compatible_shallow_copy_type "
      "_debug_has_internal_overlap _make_dual _shape_as_tensor _unsafe_view "
      "align_tensors atleast_1d atleast_2d atleast_3d is_distributed meshgrid "
      "unflatten_dense_tensors unsafe_chunk unsafe_split unsafe_split_with_sizes ";
  if (begins_with(name, "aten::") &&
      names.find(" " + std::string(name.substr(6)) + " ") != std::string_view::npos) {
    return true;
  }
  if (name == "esper_alloc::record_use" || name == "esper_alloc::order" ||
      name == "esper_alloc::in_memory" || begins_with(name, "aten::new_") ||
      (begins_with(name, "aten::") && ends_with(name, "_like"))) {
    return true;
  }
  const auto handle = c10::Dispatcher::singleton().findSchema(operator_name);
  return handle && handle->hasTag(at::Tag::inplace_view);
}

const Operation *make(Book &b, const c10::FunctionSchema &schema)
{
  auto *made = new Operation{schema.name(),
                             static_cast<uint32_t>(b.all.size() + 1),
                             schema.name() == "aten::record_stream",
                             false,
                             false,
                             !begins_with(schema.name(), "aten::"),
                             {}};
  const bool nothing = touches_nothing(schema.name(), schema.operator_name());
  made->writes_what_it_allocates = !nothing && !begins_with(schema.name(), "aten::empty") &&
                                   !begins_with(schema.name(), "aten::_empty");
  const bool has_model = schema.name() == "aten::type_as" ||
                         (schema.name() == "aten::to" && schema.overload_name() == "other");
  for (size_t i = 0; i < Operation::known; ++i) {
    Argument &what = made->arguments[i];
    what = Argument::read;
    if (nothing) {
      what = Argument::none;
    } else if (i < schema.arguments().size()) {
      if (const c10::AliasInfo *alias = schema.arguments()[i].alias_info()) {
        what = alias->isWrite() ? Argument::write : Argument::none;
      } else if (has_model && schema.arguments()[i].name() == "other") {
        what = Argument::none; // only its type and device are asked for
      }
    }
  }
  for (const c10::Argument &result : schema.returns()) {
    made->makes_views = made->makes_views || result.alias_info() != nullptr;
  }
  b.all.push_back(made);
  return made;
}

} // namespace

const Operation *find_operation(const at::RecordFunction &function)
{
  const char *name = function.name();
  Book &b = book();
  {
    std::shared_lock<std::shared_mutex> lock(b.mutex);
    const auto found = b.by_name.find(name);
    // A registration may have gone, and something else be at its place.
    if (C10_LIKELY(found != b.by_name.end() && found->second->name == name)) {
      return found->second;
    }
  }
  const auto schema = function.operator_schema();
  if (!schema) {
    return nullptr;
  }
  std::unique_lock<std::shared_mutex> lock(b.mutex);
  return b.by_name[name] = make(b, *schema);
}

std::string operation_name(uint32_t number)
{
  Book &b = book();
  std::shared_lock<std::shared_mutex> lock(b.mutex);
  return number == 0 || number > b.all.size() ? std::string() : b.all[number - 1]->name;
}

uint32_t operation_number(const char *name)
{
  Book &b = book();
  std::unique_lock<std::shared_mutex> lock(b.mutex);
  const Operation *&found = b.by_name[name];
  if (found == nullptr) {
    found = new Operation{name, static_cast<uint32_t>(b.all.size() + 1), false, false, false, false,
                          {}};
    b.all.push_back(found);
  }
  return found->number;
}

} // namespace esper
