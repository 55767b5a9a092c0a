#include "wires/stream/transfer_table.h"

#include <utility>

namespace mooncake {

// A request's number: generation << 32 | slot.
//
// Destroying a MemoryRegion waits for its readers, so that is done without the lock.

Result<uint64_t> TransferTable::add(const GetRequest& request) {
  return add(Transfer{.target = request.target.data(),
                      .bytes = request.target.size(),
                      .completion = request.completion,
                      .isOfProgram = request.isOfProgram,
                      .owner = request.owner});
}

Result<uint64_t> TransferTable::add(const WriteRequest& request) {
  return add(
      Transfer{.bytes = request.source.size(), .completion = request.completion, .isWrite = true});
}

Result<uint64_t> TransferTable::addPull(const WriteRequest& request, MemoryRegion source) {
  return add(Transfer{.bytes = request.source.size(),
                      .completion = request.completion,
                      .isWrite = true,
                      .hasLeft = true,
                      .pulled = request,
                      .source = std::move(source)});
}

Result<uint64_t> TransferTable::add(Transfer transfer) {
  Lock lock(mutex_);
  if (free_.empty()) {
    if (transfers_.size() == wire::kMaxTransfers) {
      return Error{ErrorCode::kExhausted, std::to_string(wire::kMaxTransfers) +
                                              " transfers are under way on this connection"};
    }
    transfers_.emplace_back();
    free_.push_back(static_cast<uint32_t>(transfers_.size() - 1));
  }
  const uint32_t slot = free_.back();
  free_.pop_back();
  transfer.generation = transfers_[slot].generation;
  transfer.used = true;
  unanswered_.fetch_add(transfer.bytes, std::memory_order_relaxed);
  transfer.completion->begin();  // before the request leaves: its answer may come at once
  transfers_[slot] = std::move(transfer);
  return uint64_t(transfers_[slot].generation) << 32 | slot;
}

TransferTable::Transfer* TransferTable::find(uint64_t request) {
  Lock lock(mutex_);
  const uint64_t slot = request & 0xffffffff;
  if (slot >= transfers_.size()) return nullptr;
  Transfer& transfer = transfers_[slot];
  return transfer.used && transfer.generation == request >> 32 ? &transfer : nullptr;
}

void TransferTable::received(Transfer& get, uint64_t bytes) {
  get.received += bytes;
  unanswered_.fetch_sub(bytes, std::memory_order_relaxed);
}

void TransferTable::hasLeft(uint64_t write) {
  Lock lock(mutex_);
  transfers_[static_cast<uint32_t>(write)].hasLeft = true;
}

bool TransferTable::isAnswerable(const Transfer& transfer) {
  Lock lock(mutex_);
  return !transfer.isWrite || transfer.hasLeft;
}

WriteRequest TransferTable::sendInstead(uint64_t pull) {
  MemoryRegion source;
  Lock lock(mutex_);
  Transfer& transfer = transfers_[static_cast<uint32_t>(pull)];
  source = std::move(transfer.source);
  if (!transfer.completion || !transfer.pulled.completion) return {};
  transfer.hasLeft = false;
  return std::exchange(transfer.pulled, {});
}

void TransferTable::finish(uint64_t request, ErrorCode code) {
  const uint32_t slot = static_cast<uint32_t>(request);
  Completion* completion;
  Error failure;
  {
    MemoryRegion source;  // destroyed without the lock, and before the completion ends
    Lock lock(mutex_);
    Transfer& transfer = transfers_[slot];
    unanswered_.fetch_sub(transfer.bytes - transfer.received, std::memory_order_relaxed);
    completion = std::exchange(transfer.completion, nullptr);
    source = std::move(transfer.source);
    failure = std::exchange(transfer.failure, {});
    transfer.used = false;
    ++transfer.generation;
    free_.push_back(slot);
  }
  if (!completion) return;
  failure.code == ErrorCode::kOk ? completion->end(code) : completion->end(failure);
}

void TransferTable::failLater(uint64_t request, const Error& failure) {
  Lock lock(mutex_);
  Transfer& transfer = transfers_[static_cast<uint32_t>(request)];
  if (transfer.used && transfer.generation == request >> 32 &&
      transfer.failure.code == ErrorCode::kOk)
    transfer.failure = failure;
}

void TransferTable::fail(uint64_t request, ErrorCode code) {
  Completion* completion = nullptr;
  {
    Lock lock(mutex_);
    Transfer& transfer = transfers_[static_cast<uint32_t>(request)];
    if (transfer.used && transfer.generation == request >> 32)
      completion = std::exchange(transfer.completion, nullptr);
  }
  if (completion) completion->end(code);
}

std::vector<Completion*> TransferTable::withdraw(const Completion* completion) {
  return withdrawThose([&](const Transfer& transfer) { return transfer.completion == completion; });
}

std::vector<Completion*> TransferTable::withdrawAll() {
  return withdrawThose([](const Transfer&) { return true; });
}

void TransferTable::cancelAll(ErrorCode code) {
  for (Completion* completion : withdrawAll()) completion->end(code);
}

bool TransferTable::isEmpty() {
  Lock lock(mutex_);
  return free_.size() == transfers_.size();
}

void TransferTable::forget() {
  cancelAll(ErrorCode::kPeerLost);
  Lock lock(mutex_);
  free_.clear();
  for (uint32_t slot = 0; slot < transfers_.size(); ++slot) {
    Transfer& transfer = transfers_[slot];
    if (transfer.used) ++transfer.generation;
    transfer.used = false;
    free_.push_back(slot);
  }
  unanswered_.store(0, std::memory_order_relaxed);
}

template <typename Which>
std::vector<Completion*> TransferTable::withdrawThose(Which&& which) {
  std::vector<Completion*> withdrawn;
  std::vector<MemoryRegion> sources;  // destroyed before the owners of that memory are told
  {
    Lock lock(mutex_);
    for (Transfer& transfer : transfers_) {
      if (!transfer.completion || !which(transfer)) continue;
      withdrawn.push_back(std::exchange(transfer.completion, nullptr));
      if (transfer.source) sources.push_back(std::move(transfer.source));
    }
  }
  return withdrawn;
}

}  // namespace mooncake
