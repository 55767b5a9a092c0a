#include "engine/memory/lease_table.h"

#include <string>
#include <utility>

namespace mooncake {

Result<std::unique_ptr<LeaseTable>> LeaseTable::create(Arena& arena) {
  auto block = arena.allocate(kMost * sizeof(std::atomic<uint64_t>));
  if (!block.ok()) return block.error();
  return std::unique_ptr<LeaseTable>(new LeaseTable(std::move(*block)));
}

Result<LeaseTable::Lease> LeaseTable::take() {
  Lock lock(mutex_);
  uint32_t index = used_;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else if (used_ == kMost) {
    return Error{ErrorCode::kExhausted,
                 std::to_string(kMost) + " groups share this engine: destroy some of them first"};
  } else {
    ++used_;
  }
  return Lease(*this, index);
}

LeaseTable::Lease::Lease(Lease&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)), index_(other.index_) {}

LeaseTable::Lease& LeaseTable::Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  end();
  table_ = std::exchange(other.table_, nullptr);
  index_ = other.index_;
  return *this;
}

LeaseTable::Remote LeaseTable::Lease::describe() const {
  const uint64_t offset = table_->block_.offset() + index_ * sizeof(std::atomic<uint64_t>);
  return {offset, table_->at(index_).load(std::memory_order_relaxed)};
}

void LeaseTable::Lease::end() {
  LeaseTable* table = std::exchange(table_, nullptr);
  if (!table) return;
  table->at(index_).fetch_add(1, std::memory_order_release);
  Lock lock(table->mutex_);
  table->free_.push_back(index_);
}

}  // namespace mooncake
