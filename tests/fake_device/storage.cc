#include "storage.h"

#include <algorithm>

#include <c10/core/DeviceGuard.h>

#include "allocator.h"

namespace fake_device {

void resizeStorage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr memory = allocator().allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) allocator().copy_data(memory.mutable_get(), storage.data(), kept);
  storage.set_data_ptr(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace fake_device
