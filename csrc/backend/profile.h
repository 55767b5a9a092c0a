#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace mooncake {

// A call's event for torch's profiler. It begins with the call and ends when the operation has
// finished, or when it has been enqueued on a stream.
// Empty while no profiler runs.
struct Profile {
  std::string name;  // "mooncake-cpu:all_reduce"
  std::optional<std::vector<at::Tensor>> inputs;

  const char* title() const { return name.empty() ? nullptr : name.c_str(); }
};

// `event`: the name that torch's own backends use, because tools that read traces look for it.
Profile profileOf(const std::string& backend, const char* event, at::TensorList inputs);

}  // namespace mooncake
