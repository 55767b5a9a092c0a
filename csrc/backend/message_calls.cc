#include "backend/message_calls.h"

#include <string>
#include <utility>

#include "backend/arguments.h"
#include "backend/batch_work.h"
#include "backend/errors.h"
#include "backend/profile.h"
#include "backend/tensors.h"

namespace mooncake {
namespace {

// In traces, as torch's own backends name it.
const char* eventOf(c10d::OpType type) {
  if (type == c10d::OpType::SEND) return "send";
  return type == c10d::OpType::RECV ? "recv" : "recvAnySource";
}

}  // namespace

void MessageCalls::check(c10d::OpType type, const std::vector<at::Tensor>& tensors, int peer,
                         int tag) const {
  const bool isSend = type == c10d::OpType::SEND;
  const char* name = isSend ? "send" : "recv";
  const at::Tensor& tensor = onlyTensor(tensors, name);
  const char* what = isSend ? "the tensor of send" : "the tensor of recv";
  throwIfError(checkDense(tensor, what));
  if (!isSend) refuseOwnOverlap(tensor, what);
  if (peer != PointToPoint::kAnySource) {
    if (peer < 0 || peer >= group_.size())
      refuse(std::string(name) + ": rank " + std::to_string(peer) + " is not in a group of " +
             std::to_string(group_.size()));
    if (peer == group_.rank())
      refuse(std::string(name) + ": rank " + std::to_string(peer) + " is this rank itself");
  }
  if (tag < 0) refuse(std::string(name) + ": the tag " + std::to_string(tag) + " is negative");
}

std::shared_ptr<MessageMemory> MessageCalls::memoryOf(const at::Tensor& tensor) const {
  return std::make_shared<MessageMemory>(tensor, group_.completions());
}

PointToPoint::OnDone MessageCalls::tellingOf(uint64_t key) const {
  if (!group_.hooks()->any()) return nullptr;
  return [hooks = group_.hooks(), key] { hooks->tell(key); };
}

c10::intrusive_ptr<MessageWork> MessageCalls::start(c10d::OpType type,
                                                    std::shared_ptr<MessageMemory> memory, int peer,
                                                    int tag,
                                                    const std::shared_ptr<MessageCopies>& copies) {
  const BackendOptions& options = group_.options();
  const std::shared_ptr<MessageDriver>& driver = group_.messages();
  const Deadline until = group_.deadline(options.messageTimeout.value_or(options.timeout));
  const uint64_t key = group_.hooks()->newKey();
  const Profile profile = profileOf(options.name, eventOf(type), memory->tensor());
  PointToPoint& messages = driver->messages();
  PointToPoint::HasData hasData;
  MessageDevice device;
  if (copies) {
    hasData = [copies] { return copies->hasData(); };
    device = copies->device();
  }
  auto message = type == c10d::OpType::SEND
                     ? messages.send(memory->bytes(), peer, uint32_t(tag), until, tellingOf(key),
                                     memory, std::move(hasData), std::move(device))
                     : messages.receive(memory->place(), peer, uint32_t(tag), until, tellingOf(key),
                                        memory, std::move(device));
  auto work = c10::make_intrusive<MessageWork>(group_.rank(), options.capacity, type, driver,
                                               message, memory, profile, key);
  if (copies) settleWhenFinished(work, copies);
  // If the caller drops the work, the data must still reach its tensor.
  if (type != c10d::OpType::SEND && memory->isCopy()) {
    if (work->finished()) {
      work->takeOverQuietly();
    } else {
      driver->whenFinished(message, [work] { work->takeOverQuietly(); });
    }
  }
  if (work->finished() && !messages.owes()) return work;
  if (const Status watched = driver->watch(); !watched.ok()) {
    work->cancel(watched.error());
    throwError(watched.error());
  }
  return work;
}

void MessageCalls::settleWhenFinished(const c10::intrusive_ptr<MessageWork>& work,
                                      const std::shared_ptr<MessageCopies>& copies) {
  copies->watch(work);
  group_.messages()->settleWhenFinished(work->message(), [copies] {
    try {
      copies->settle();
    } catch (const std::exception&) {  // of torch. wait() copies again, and raises
      copies->release();
    }
  });
}

MessageCalls::WorkPtr MessageCalls::post(c10d::OpType type, const std::vector<at::Tensor>& tensors,
                                         int peer, int tag,
                                         const std::shared_ptr<MessageCopies>& copies) {
  group_.refuseInForkedChild();
  return group_.batches().within([&]() -> WorkPtr {
    check(type, tensors, peer, tag);
    if (!copies) throwIfError(checkTensor(tensors[0], "the tensor of a message"));
    if (const auto batch = group_.batches().current()) {
      return Coalescing::keep(
          batch, group_.rank(),
          {.type = type, .tensor = tensors[0], .peer = peer, .tag = tag, .copies = copies});
    }
    return start(type, memoryOf(tensors[0]), peer, tag, copies);
  });
}

MessageCalls::WorkPtr MessageCalls::endBatch() {
  group_.refuseInForkedChild();
  const auto block = group_.batches().current();
  if (!block) refuse("endCoalescing() without startCoalescing()");
  (void)group_.batches().end();
  Coalescing::Batch& batch = *block;
  if (batch.error) std::rethrow_exception(batch.error);
  // Copies first: if one of them fails, nothing is posted.
  std::vector<std::shared_ptr<MessageMemory>> memories;
  for (const auto& kept : batch.messages) memories.push_back(memoryOf(kept.tensor));
  std::vector<c10::intrusive_ptr<MessageWork>> posted;
  try {
    // Receives first: data that arrives meanwhile then goes straight to its place.
    for (const bool isSend : {false, true}) {
      for (size_t i = 0; i < batch.messages.size(); ++i) {
        const auto& kept = batch.messages[i];
        if ((kept.type == c10d::OpType::SEND) != isSend) continue;
        posted.push_back(
            start(kept.type, std::move(memories[i]), kept.peer, kept.tag, kept.copies));
        batch.works[kept.place] = posted.back();
      }
    }
    return c10::make_intrusive<BatchWork>(group_.rank(), group_.options().capacity,
                                          std::move(batch.works));
  } catch (const std::exception& error) {
    for (const auto& work : posted)
      work->cancel({ErrorCode::kAborted, std::string("its batch was not posted: ") + error.what()});
    throw;
  }
}

}  // namespace mooncake
