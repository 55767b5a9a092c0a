#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace mooncake {

// What torch's profiler is to show of a call: its event begins when the call is made, and ends when
// it has finished. Nothing, as long as nobody profiles.
struct Profile {
  std::string name;  // "mooncake-cpu:all_reduce"
  std::optional<std::vector<at::Tensor>> inputs;

  const char* title() const { return name.empty() ? nullptr : name.c_str(); }
};

Profile profileOf(const std::string& backend, c10d::OpType type, at::TensorList inputs);

}  // namespace mooncake
