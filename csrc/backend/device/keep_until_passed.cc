#include "backend/device/keep_until_passed.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace mooncake {

void keepUntilPassed(const at::Tensor& tensor, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

void keepUntilPassed(const std::vector<at::Tensor>& tensors, const c10::Stream& stream) {
  for (const at::Tensor& tensor : tensors) keepUntilPassed(tensor, stream);
}

}  // namespace mooncake
