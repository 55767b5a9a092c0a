#include "backend/device/staging.h"

#include <algorithm>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/device_scope.h"
#include "backend/device/group_streams.h"
#include "backend/device/keep_until_passed.h"
#include "backend/errors.h"
#include "backend/signals.h"
#include "backend/tensors.h"
#include "device/row_copies.h"
#include "group/group.h"

namespace mooncake {
namespace {

c10::impl::VirtualGuardImpl guardOf(const c10::Stream& stream) {
  return c10::impl::VirtualGuardImpl(stream.device_type());
}

}  // namespace

at::Tensor Staging::input(const at::Tensor& tensor, const char* what, UsedRows used) {
  return add(tensor, what, true, false, std::move(used));
}

at::Tensor Staging::output(const at::Tensor& tensor, const char* what, UsedRows used) {
  return add(tensor, what, false, true, std::move(used));
}

at::Tensor Staging::inOut(const at::Tensor& tensor, const char* what) {
  return add(tensor, what, true, true, {});
}

at::Tensor Staging::add(const at::Tensor& tensor, const char* what, bool isInput, bool isOutput,
                        UsedRows used) {
  throwIfError(checkDense(tensor, what));
  if (tensor.device() != stream_.device()) {
    refuse(std::string(what) + " is on " + tensor.device().str() +
           ", another tensor of the call on " + stream_.device().str() +
           "; an operation takes tensors of one device");
  }
  if (isOutput) refuseOwnOverlap(tensor, what);
  const at::NoGradGuard plain;
  at::Tensor host;
  enqueue([&] { host = emptyOnHost(tensor); });
  copies_.push_back({tensor.detach(), host, isInput, isOutput, std::move(used)});
  hasInputs_ |= isInput;
  hasOutputs_ |= isOutput;
  return host;
}

at::Tensor Staging::newCounts(int64_t blocks) {
  const at::NoGradGuard plain;
  at::Tensor counts;
  enqueue([&] { counts = emptyOnHost(at::empty({blocks}, at::kInt)); });
  return counts.zero_();
}

at::Tensor Staging::emptyOnHost(const at::Tensor& tensor) {
  const auto options = at::TensorOptions(tensor.scalar_type()).device(at::kCPU);
  PinnedPool* const pool = streams_->pinned();
  if (!pool) return at::empty(tensor.sizes(), options.pinned_memory(true));
  const auto piece = std::make_shared<PinnedPool::Piece>(orThrow(pool->take(tensor.nbytes())));
  const auto giveBack = [pool, piece, last = last_](void*) {
    pool->giveBack(std::move(*piece), *last);
  };
  return at::from_blob(piece->memory.data(), tensor.sizes(), giveBack, options);
}

Staging::~Staging() {
  dropOnDevice([&] {
    reached_.reset();
    pieces_.clear();
    copies_.clear();
  });
}

void Staging::dropOnDevice(const std::function<void()>& drop) const noexcept {
  c10::OptionalDeviceGuard on;
  try {
    on.reset_device(stream_.device());
  } catch (const std::exception&) {
    // The context is lost, so that no other one is made either.
  }
  drop();
}

c10::Stream Staging::callersStream() const { return guardOf(stream_).getStream(stream_.device()); }

void Staging::enqueue(const std::function<void()>& part) const {
  try {
    part();
  } catch (const std::exception& error) {
    if (endGroup_)
      endGroup_({ErrorCode::kSystem, "an operation could not be enqueued on " +
                                         stream_.device().str() + ": " + error.what()});
    throw;
  }
}

void Staging::markReached() {
  const c10::Stream callers = callersStream();
  if (isCapturing(callers))
    refuseRecording(callers, "no graph takes this operation (docs/gpu.md)", kOutsideOfCapture);
  enqueue([&] { reached_.emplace(stream_.device_type()).record(callers); });
}

template <typename Visit>
void Staging::forParts(const Copy& copy, const Visit& visit) const {
  const auto& [counts, areLast] = copy.used;
  if (!counts.defined() || areLast || isOrdered()) return visit(copy.device, copy.host);
  const int32_t* const used = counts.const_data_ptr<int32_t>();
  for (int64_t block = 0; block < counts.numel(); ++block) {
    if (used[block] == 0) continue;
    const auto part = [&](const at::Tensor& all) {
      return all.select(0, block).narrow(0, 0, used[block]);
    };
    visit(part(copy.device), part(copy.host));
  }
}

bool Staging::isByKernel(const Copy& copy) const {
  return copy.used.counts.defined() && isOrdered() && streams_->copiesRows();
}

void Staging::copyUsedRows(const Copy& copy, const c10::Stream& stream, bool toHost) const {
  const at::Tensor& counts = copy.used.counts;
  const at::Tensor& all = copy.device;
  const int64_t blocks = copy.used.areLast ? all.size(0) * all.size(1) : all.size(0);
  const int64_t rows = copy.used.areLast ? all.size(2) : all.size(1);
  if (all.numel() == 0) return;
  void *const onDevice = all.data_ptr(), *const onHost = copy.host.data_ptr();
  throwIfError(mooncake::copyRows(*streams_->accelerator(), OwnStream::nativeOf(stream),
                                  {.to = toHost ? onHost : onDevice,
                                   .from = toHost ? onDevice : onHost,
                                   .counts = counts.const_data_ptr<int32_t>(),
                                   .blocks = uint32_t(blocks),
                                   .blocksEach = uint32_t(blocks / counts.numel()),
                                   .rows = uint32_t(rows),
                                   .rowBytes = all.nbytes() / size_t(blocks * rows)}));
}

void Staging::copyToHost(const Copy& copy, const c10::Stream& stream) const {
  if (isByKernel(copy)) return copyUsedRows(copy, stream, true);
  const PlainWrites plain(copy.host);
  forParts(copy, [](const at::Tensor& device, const at::Tensor& host) {
    // torch conjugates and negates the copy on the host, without a wait for an asynchronous one.
    host.copy_(device.resolve_conj().resolve_neg(), /*non_blocking=*/true);
  });
}

void Staging::copyIn(const c10::Stream& stream) {
  if (isCut()) {
    copyPieces(stream);
  } else {
    copyInputs(stream);
  }
  for (const Copy& copy : copies_) keepUntilPassed(copy.device, stream);
}

std::vector<std::pair<at::Tensor, at::Tensor>> Staging::cutParts() const {
  std::vector<std::pair<at::Tensor, at::Tensor>> parts;
  for (const Copy& copy : copies_) {
    if (!copy.isInput) continue;
    const PlainWrites plain(copy.host);
    const at::Tensor device = copy.device.resolve_conj().resolve_neg().contiguous().view(-1);
    const at::Tensor host = copy.host.view(-1);
    std::vector<int64_t> lengths = cut_.lengths;
    if (lengths.empty()) lengths.assign(cut_.parts, device.numel() / int64_t(cut_.parts));
    int64_t begin = 0;
    for (const int64_t length : lengths) {
      parts.emplace_back(device.narrow(0, begin, length), host.narrow(0, begin, length));
      begin += length;
    }
  }
  return parts;
}

void Staging::copyPieces(const c10::Stream& stream) {
  const c10::StreamGuard on(stream);
  const auto parts = cutParts();
  if (parts.empty()) return;
  int64_t longest = 0;
  for (const auto& [device, host] : parts) longest = std::max(longest, device.numel());
  const int64_t most = int64_t(cut_.pieceBytes / parts[0].first.element_size());
  for (int64_t begin = 0; begin < longest; begin += most) {
    for (const auto& [device, host] : parts) {
      const int64_t count = std::min(most, device.numel() - begin);
      if (count <= 0) continue;
      const PlainWrites plain(host);
      host.narrow(0, begin, count).copy_(device.narrow(0, begin, count), /*non_blocking=*/true);
    }
    onPiece(stream);
  }
}

void Staging::onPiece(const c10::Stream& stream) {
  pieces_.emplace_back(stream.device_type()).record(stream);
}

Status Staging::awaitInput(Group& group, size_t bytes) const {
  if (!comesInPieces()) return {};
  const c10::Event& piece = pieces_.at(piecesOf(bytes, pieces_.size()) - 1);
  return awaitOnHost(group, [&] { return piece.query(); });
}

Status Staging::fetchAgainOn(const c10::Stream& stream, Group& group) const {
  const DeviceScope on(stream.device());
  MOONCAKE_TRY(awaitOnHost(group, [&] { return pieces_.back().query(); }));
  c10::Event copied(stream.device_type());
  // The memory of both sides is used again in the order of our stream.
  const auto join = [&] {
    copied.record(stream);
    if (stream != stream_) copied.block(stream_);
  };
  try {
    copyInputs(stream);
  } catch (...) {
    join();  // some copies may be enqueued
    throw;
  }
  join();
  return awaitOnHost(group, [&] { return copied.query(); });
}

void Staging::copyInputs(const c10::Stream& stream) const {
  const c10::StreamGuard on(stream);
  for (const Copy& copy : copies_) {
    if (copy.isInput) copyToHost(copy, stream);
  }
}

void Staging::forgetOwners() {
  const at::NoGradGuard plain;
  for (Copy& copy : copies_) {
    const at::Tensor& owner = copy.device;
    at::Tensor place = at::from_blob(
        owner.data_ptr(), owner.sizes(), owner.strides(), [](void*) {}, owner.options(),
        owner.device());
    place._set_conj(owner.is_conj());
    place._set_neg(owner.is_neg());
    copy.device = place;
  }
}

void Staging::keepOutputs(const c10::Stream& stream) const {
  const c10::StreamGuard on(stream);
  for (const Copy& copy : copies_) {
    // The counts of an operation that failed are zero.
    if (copy.isOutput && !isByKernel(copy)) copyToHost(copy, stream);
  }
}

void Staging::clearOutputs(const c10::Stream& stream) const {
  const c10::StreamGuard on(stream);
  for (const Copy& copy : copies_) {
    if (!copy.isOutput) continue;
    const PlainWrites plain(copy.host);
    copy.host.zero_();
  }
}

void Staging::copyOut(const c10::Stream& stream) const {
  const c10::StreamGuard on(stream);
  for (const Copy& copy : copies_) {
    if (!copy.isOutput) continue;
    copyToDevice(copy, stream);
    keepUntilPassed(copy.device, stream);
  }
}

void Staging::copyToDevice(const Copy& copy, const c10::Stream& stream) const {
  if (isByKernel(copy)) return copyUsedRows(copy, stream, false);
  const PlainWrites plain(copy.device);
  forParts(copy, [](const at::Tensor& device, const at::Tensor& host) {
    device.copy_(host, /*non_blocking=*/true);
  });
}

Status Staging::awaitReached(Group& group) const {
  return awaitOnHost(group, [&] { return reached_->query(); });
}

Error Staging::lateError(const Group& group) const {
  return {ErrorCode::kTimeout,
          stream_.device().str() + " on " + group.nameRank(group.rank()) +
              " has not come to the operation after " + std::to_string(limit_.count()) +
              " ms: earlier work on the caller's stream still runs. Give the group a longer "
              "timeout, or find the work that hangs"};
}

Status Staging::awaitOnHost(Group& group, const std::function<bool()>& ready) const {
  // A copy of a few kilobytes is over within the first looks. Longer waits leave the core to other
  // threads, for pauses that grow.
  constexpr int kBusyLooks = 100;
  constexpr std::chrono::microseconds kLongestPause(200);
  const DeviceScope on(stream_.device());  // else a query may make a context on device 0
  const Deadline deadline = Deadline::after(limit_);
  std::chrono::microseconds pause(1);
  for (int look = 0; !ready(); ++look) {
    MOONCAKE_TRY(group.usable());
    if (deadline.passed()) return lateError(group);
    if (look < kBusyLooks) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    Interruptible::look();  // ends the group if a handler raises
    pause = std::min(2 * pause, kLongestPause);
    if (reached_) (void)reached_->query();  // throws if the device's context is lost
  }
  return {};
}

Error cannotFetch(const Staging& staging, const std::exception& why) {
  return {ErrorCode::kSystem, "the inputs of an operation could not be copied from " +
                                  staging.stream().device().str() + ": " + why.what()};
}

Status StagedTurn::fetch(Group& group) {
  try {
    return staging_->fetch(group);
  } catch (const std::exception& error) {
    return cannotFetch(*staging_, error);
  }
}

Status StagedTurn::fetchOrFail(Group& group) {
  Status status = fetch(group);
  if (!status.ok()) group.fail(status.error());
  return status;
}

Status StagedTurn::end(Status status) {
  if (!status.ok()) {
    staging_->abandon();
    return status;
  }
  try {
    staging_->giveBack();
    return status;
  } catch (const std::exception& error) {
    return {ErrorCode::kSystem, "the results of an operation could not be copied to " +
                                    staging_->stream().device().str() + ": " + error.what()};
  }
}

}  // namespace mooncake
