#pragma once

#include <c10/core/Storage.h>

namespace fake_device {

// Gives the storage other memory, with a copy of the old contents on the current stream.
void resizeStorage(const c10::Storage& storage, size_t bytes);

}  // namespace fake_device
