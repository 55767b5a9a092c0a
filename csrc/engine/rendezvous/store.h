#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/result.h"

namespace mooncake {

// The key/value store that brings the members of a group together. Needed only while a group is
// being created.
class Store {
 public:
  virtual ~Store() = default;
  virtual Status set(const std::string& key, ByteView value) = 0;
  // Adds to the end of the key's value, which is empty at first.
  virtual Status append(const std::string& key, ByteView value) = 0;
  // Waits for all keys. kTimeout: a key did not come in time.
  virtual Result<std::vector<Bytes>> get(const std::vector<std::string>& keys,
                                         Deadline deadline) = 0;
  virtual Result<bool> present(const std::string& key) = 0;
};

}  // namespace mooncake
