#include "ep/buffer.h"

#include "base/thread.h"
#include "base/wait.h"
#include "ep/shared_rows.h"

namespace mooncake::ep {

Result<std::shared_ptr<Buffer>> Buffer::create(std::unique_ptr<Group> group, size_t bytes,
                                               Deadline deadline, bool hasResults) {
  std::shared_ptr<Buffer> buffer(new Buffer(std::move(group), bytes));
  const BufferLayout layout(bytes, hasResults);
  auto block = buffer->group_->reserve(std::max<size_t>(bytes, 1));
  const auto memory = block.ok() ? buffer->land(*block, layout) : block.error();
  auto hosts = Hosts::meet(*buffer->group_, memory, deadline);
  if (!hosts.ok()) return hosts.error();
  buffer->memory_.reset(new Memory{*buffer->group_, *block, layout, std::move(*hosts)});
  buffer->unmaskAll();
  return buffer;
}

// Registers the send memory, into which ranks that do not map us put rows.
Result<Hosts::Memory> Buffer::land(const Group::Shared& block, const BufferLayout& layout) {
  auto landing =
      group_->engine().regions().add(block.data, 2 * layout.sendBytes(), kRemoteWrite | kLasting);
  if (!landing.ok()) return landing.error();
  landing_ = std::move(*landing);
  return Hosts::Memory{.sendBytes = layout.sendBytes(), .region = landing_.remote()};
}

Buffer::~Buffer() { close(Deadline::after(group_->engine().env().failureTimeout)); }

Result<std::shared_ptr<const ExpertMap>> Buffer::experts(int count) {
  if (isSet_ && experts_->numExperts() != count) {
    return Error{ErrorCode::kInvalidArgument,
                 "num_experts is " + std::to_string(count) + ", but the owners of " +
                     std::to_string(experts_->numExperts()) + " experts were set"};
  }
  if (!experts_ || experts_->numExperts() != count)
    experts_ = std::make_shared<const ExpertMap>(count, group_->size());
  return experts_;
}

void Buffer::setExperts(std::shared_ptr<const ExpertMap> experts) {
  isSet_ = experts != nullptr;
  experts_ = std::move(experts);
}

Status Buffer::checkRoom(const Shape& shape, const ExpertMap& experts) const {
  const size_t local = experts.numLocal(group_->rank());
  const size_t table = CombineTable::bytesFor(local, shape.numRanks);
  const size_t room = group_->slotBytes() - mostInlineBytes(*group_);
  if (table > room) {
    return {ErrorCode::kInvalidArgument,
            group_->nameRank(group_->rank()) + ": a table of the rows of " + std::to_string(local) +
                " experts for " + std::to_string(shape.numRanks) + " ranks has " +
                std::to_string(table) + " bytes, there is room for " + std::to_string(room) +
                ": give this rank fewer experts"};
  }
  const bool fits = BufferLayout::sendNeed(shape, local) <= memory_->layout.sendBytes() &&
                    BufferLayout::recvNeed(shape, local) <= memory_->layout.recvBytes();
  if (fits) return {};
  return {ErrorCode::kInvalidArgument,
          group_->nameRank(group_->rank()) + ": " + std::to_string(shape.maxTokens) +
              " tokens per rank, hidden " + std::to_string(shape.hidden) + " and " +
              std::to_string(local) + " experts on this rank of " + std::to_string(shape.numRanks) +
              " need a buffer of " + std::to_string(BufferLayout::bytesFor(shape, local)) +
              " bytes, this one has " + std::to_string(bytes_) +
              ": make it as large as the size hint says"};
}

std::byte* Buffer::nextRecv() {
  // A failed dispatch is called again, and must not overwrite the result before it.
  while (!results_.empty() && results_.back().dispatch->hasFailed()) results_.pop_back();
  const bool isFirstKept = !results_.empty() && results_.back().recv == memory_->recv(0);
  return memory_->recv(isFirstKept ? 1 : 0);
}

void Buffer::keepResult(std::byte* recv, std::shared_ptr<Task> dispatch) {
  results_.push_back({recv, std::move(dispatch)});
  if (results_.size() > 2) results_.pop_front();
}

Result<Buffer::NextSend> Buffer::nextSend(Deadline deadline) {
  {
    Lock lock(mutex_);
    const auto isIdle = [&]() REQUIRES(mutex_) { return !isRunning_ && tasks_.empty(); };
    if (!changed_.wait_until(mutex_, deadline.when(), isIdle))
      return Error{ErrorCode::kTimeout, "the calls before have not ended in time"};
  }
  const uint64_t number = group_->lastNumber + 1;
  MOONCAKE_TRY(group_->agent().awaitSlotBefore(number));
  return NextSend{memory_->send(number), number};
}

void Buffer::mask(int rank, bool isMasked) {
  if (isMasked) {
    mask_ -= GroupRanks{rank};
  } else {
    mask_.add(rank);
  }
}

void Buffer::unmaskAll() { mask_ = GroupRanks::firstRanks(group_->size()); }

GroupRanks Buffer::view() const {
  GroupRanks active;
  for (const int r : group_->agent().viewWhenIdle()->active) active.add(r);
  return active;
}

std::shared_ptr<Task> Buffer::submit(std::function<Status(Memory&)> run, bool inBackground) {
  auto task = std::make_shared<Task>([this, run = std::move(run)] { return run(*memory_); });
  Lock lock(mutex_);
  if (isClosed_) {
    task->status_ = {ErrorCode::kAborted, "the buffer was destroyed"};
    task->isDone_.store(true, std::memory_order_release);
    return task;
  }
  if (!inBackground && !isRunning_ && tasks_.empty()) {
    isRunning_ = true;
    lock.unlock();
    carryOut(*task);
    return task;
  }
  if (!thread_.joinable()) {
    auto thread = startThread("mooncake-ep", [this] { runThread(); });
    if (!thread.ok()) {
      task->status_ = thread.error();
      task->isDone_.store(true, std::memory_order_release);
      return task;
    }
    thread_ = std::move(*thread);
  }
  tasks_.push_back(task);
  changed_.notify_all();
  lock.unlock();
  if (!inBackground) await(*task, nullptr);
  return task;
}

void Buffer::carryOut(Task& task) {
  task.status_ = task.run_();
  {
    Lock lock(mutex_);
    task.isDone_.store(true, std::memory_order_release);
    isRunning_ = false;
    changed_.notify_all();
  }
  // Gives the call's memory back, though its work may live on. May wait for Python's lock.
  task.run_ = nullptr;
}

void Buffer::runThread() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(mutex_,
                  [&]() REQUIRES(mutex_) { return !isRunning_ && (isClosed_ || !tasks_.empty()); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    isRunning_ = true;
    lock.unlock();
    carryOut(*task);
    task.reset();
    lock.lock();
  }
}

void Buffer::await(const Task& task, const std::function<void()>& nowAndThen) {
  Lock lock(mutex_);
  while (!changed_.wait_for(mutex_, SleepObserver::kInterval,
                            [&]() REQUIRES(mutex_) { return task.isDone(); })) {
    if (!nowAndThen) continue;
    lock.unlock();
    nowAndThen();
    lock.lock();
  }
}

Status Buffer::checkTable(size_t tokens, size_t topk, int numExperts) const {
  const size_t bytes = DispatchTable::bytesFor(tokens, topk, numExperts, group_->size());
  const size_t room = group_->slotBytes() - mostInlineBytes(*group_);
  if (bytes <= room) return {};
  return {ErrorCode::kInvalidArgument, group_->nameRank(group_->rank()) + ": a routing table of " +
                                           std::to_string(tokens) + " tokens with top-" +
                                           std::to_string(topk) + " has " + std::to_string(bytes) +
                                           " bytes, there is room for " + std::to_string(room) +
                                           ": dispatch fewer tokens at a time"};
}

size_t Buffer::mostTokens(size_t rowBytes, size_t hidden, size_t extras,
                          double rowsPerToken) const {
  const size_t ranks = size_t(group_->size());
  const size_t send = memory_->hosts.leastSendBytes();
  // Between hosts, places for rows that ranks share save traffic, unless they make pieces so small
  // that their number costs more. One place has to suffice.
  constexpr size_t kLeastShared = 64;
  const size_t shared = send / (SharedRows::mostPlaces(memory_->hosts) * rowBytes);
  const size_t given = shared >= kLeastShared ? shared : send / rowBytes;
  const auto back = size_t(double(send / normalCombineRowBytes(hidden, extras)) / rowsPerToken);
  const size_t table = group_->slotBytes() - mostInlineBytes(*group_) -
                       DispatchTable::bytesFor(0, 0, int(ranks), int(ranks));
  return std::min({given, back, table / (sizeof(uint16_t) * ranks)});
}

void Buffer::close(Deadline deadline) {
  {
    Lock lock(mutex_);
    if (std::exchange(isClosed_, true)) return;
    changed_.notify_all();
    const auto isIdle = [&]() REQUIRES(mutex_) { return !isRunning_ && tasks_.empty(); };
    // A late call is in an operation with other ranks: the failure of the group ends it.
    if (!changed_.wait_until(mutex_, deadline.when(), isIdle)) {
      lock.unlock();
      group_->fail({ErrorCode::kAborted, "the buffer was destroyed"});
    }
  }
  if (thread_.joinable()) thread_.join();
  landing_ = {};
  group_->leave(deadline);
}

}  // namespace mooncake::ep
