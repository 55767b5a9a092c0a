#pragma once

#include <ATen/core/Tensor.h>

#include "backend/device/staging.h"

namespace mooncake {

// The tensors of one call as its run on the host needs them: as they are, or copies in host memory.
class HostTensors {
 public:
  // `staging`: null for CPU tensors.
  explicit HostTensors(Staging* staging) : staging_(staging) {}

  at::Tensor input(const at::Tensor& given, const char* what) const {
    return staging_ ? staging_->input(given, what) : given;
  }
  at::Tensor output(const at::Tensor& made, const char* what) const {
    return staging_ ? staging_->output(made, what) : made;
  }
  at::Tensor inOut(const at::Tensor& given, const char* what) const {
    return staging_ ? staging_->inOut(given, what) : given;
  }

 private:
  Staging* const staging_;
};

}  // namespace mooncake
