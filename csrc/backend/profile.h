#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace mooncake {

// A call's event for torch's profiler. It begins with the call and ends when the operation has
// finished, or when it has been enqueued on a stream.
// Empty while no profiler runs.
struct Profile {
  std::string name;  // "mooncake-cpu:all_reduce"
  std::optional<std::vector<at::Tensor>> inputs;

  const char* title() const { return name.empty() ? nullptr : name.c_str(); }
};

Profile profileOf(const std::string& backend, c10d::OpType type, at::TensorList inputs);

}  // namespace mooncake
