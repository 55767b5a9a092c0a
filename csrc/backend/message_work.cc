#include "backend/message_work.h"

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include "backend/completions.h"
#include "backend/errors.h"
#include "backend/message_driver.h"
#include "backend/signals.h"

namespace mooncake {
namespace {

// A signal handler that raises ends this one message; the group goes on.
class MessageInterrupt final : public Interruptible {
 public:
  explicit MessageInterrupt(MessageWork& work) : work_(work) {}

 private:
  void giveUp(const std::string& why) override { work_.cancel({ErrorCode::kAborted, why}); }
  MessageWork& work_;
};

}  // namespace

MessageWork::MessageWork(int rank, int capacity, c10d::OpType type,
                         std::shared_ptr<MessageDriver> driver, std::shared_ptr<Message> message,
                         std::shared_ptr<MessageMemory> memory, const Profile& profile,
                         uint64_t key)
    : Work(rank, type, profile.title(), profile.inputs),
      capacity_(capacity),
      key_(key),
      driver_(std::move(driver)),
      message_(std::move(message)),
      memory_(std::move(memory)) {}

// A finished message holds its memory no longer. Else the completion thread drops the memory when
// the message ends.
MessageWork::~MessageWork() {
  if (memory_ && message_->finished()) memory_->drop();
}

std::vector<at::Tensor> MessageWork::result() {
  if (!memory_ || opType_ == c10d::OpType::UNKNOWN) return {};
  return {memory_->tensor()};
}

bool MessageWork::isCompleted() {
  if (!message_->finished()) driver_->messages().progress();
  if (!message_->finished()) return false;
  takeOver();
  return true;
}

std::exception_ptr MessageWork::exception() const {
  return message_->finished() && !message_->status().ok() ? toException(message_->status().error())
                                                          : nullptr;
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline = timeout <= kNoTimeout ? message_->deadline() : Deadline::after(timeout);
  MessageInterrupt interrupt(*this);
  const Callbacks::Pause pause;
  const bool isFinished = driver_->messages().wait(*message_, deadline);
  interrupt.rethrow();
  if (!isFinished) {
    const std::string name =
        opType_ == c10d::OpType::UNKNOWN ? message_->operation() : c10d::opTypeToString(opType_);
    throwError({ErrorCode::kTimeout,
                name + " on rank " + std::to_string(rank_) + " is not done after the " +
                    std::to_string(timeout.count()) + " ms that wait() was given; it goes on"});
  }
  takeOver();
  if (!isLostQuietly()) throwIfError(message_->status());
  return true;
}

void MessageWork::cancel(const Error& why) { driver_->messages().cancel(*message_, why); }

int MessageWork::sourceRank() const {
  TORCH_CHECK(opType_ == c10d::OpType::RECVANYSOURCE || opType_ == c10d::OpType::RECV,
              "only a receive has a source");
  return message_->peer();
}

std::vector<int> MessageWork::failedRanks() const {
  if (!message_->finished() || message_->status().code() != ErrorCode::kPeerLost) return {};
  if (message_->peer() != PointToPoint::kAnySource) return {message_->peer()};
  std::vector<int> others;
  for (int r = 0; r < driver_->messages().ranks(); ++r) {
    if (r != rank_) others.push_back(r);
  }
  return others;
}

// Only for a finished message.
bool MessageWork::isLostQuietly() const {
  const auto kind = message_->kind();
  return driver_->lostMessagesReturn() && message_->status().code() == ErrorCode::kPeerLost &&
         (kind == Message::Kind::kSend || kind == Message::Kind::kReceive);
}

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  // The driver keeps this work until its message is finished.
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  driver_->whenFinished(message_, [future, self] {
    auto error = self->isLostQuietly() ? nullptr : self->exception();
    try {
      if (!error) self->takeOver();
    } catch (...) {  // of torch: an exception that leaves a thread ends the process
      error = std::current_exception();
    }
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(self->result()));
    }
  });
  return future;
}

void MessageWork::takeOverQuietly() {
  try {
    takeOver();
  } catch (const std::exception&) {
    // taken_ is not set: wait() copies again, and raises.
  }
}

void MessageWork::endProfile() {
  if (!isProfileEnded_.exchange(true) && recordFunctionEndCallback_) recordFunctionEndCallback_();
}

const std::shared_ptr<Completions>& MessageWork::completions() const {
  return driver_->completions();
}

void MessageWork::takeOver() {
  std::call_once(taken_, [&] {
    endProfile();
    if (message_->kind() != Message::Kind::kReceive) return;
    if (message_->status().ok()) memory_->copyBack();
    if (isLostQuietly()) memory_->clear();
  });
}

}  // namespace mooncake
