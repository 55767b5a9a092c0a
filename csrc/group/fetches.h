#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"

namespace mooncake {

class Operation;

// Fetches of one operation that are waited for together. The destructor ends them: no fetch touches
// its target afterwards.
class Fetches {
 public:
  explicit Fetches(Operation& op);
  ~Fetches();
  Fetches(const Fetches&) = delete;
  Fetches& operator=(const Fetches&) = delete;

  struct Piece {
    uint64_t offset = 0;
    std::span<std::byte> target;
  };
  // `region`: one that the rank has announced. Many pieces in one call cost few system calls.
  Status start(int rank, const RemoteRegion& region, std::span<const Piece> pieces);
  Status start(int rank, const RemoteRegion& region, uint64_t offset, std::span<std::byte> target) {
    const Piece piece{offset, target};
    return start(rank, region, {&piece, 1});
  }
  Status await();

 private:
  Operation& op_;
  Completion completion_;
};

}  // namespace mooncake
