#include "backend/batch_work.h"

#include <algorithm>
#include <set>

#include <ATen/core/ivalue.h>

#include "backend/collective_work.h"
#include "backend/errors.h"
#include "backend/message_work.h"
#include "base/deadline.h"

namespace mooncake {
namespace {

constexpr std::chrono::milliseconds kLeastTimeout{1};

std::vector<int> lostBy(const c10d::Work& work) {
  if (const auto* collective = dynamic_cast<const CollectiveWork*>(&work))
    return collective->lostRanks();
  if (const auto* message = dynamic_cast<const MessageWork*>(&work)) return message->failedRanks();
  return {};
}

}  // namespace

bool BatchWork::isCompleted() {
  return std::ranges::all_of(works_, [](const WorkPtr& work) { return work->isCompleted(); });
}

bool BatchWork::isSuccess() const {
  return std::ranges::all_of(works_, [](const WorkPtr& work) { return work->isSuccess(); });
}

std::exception_ptr BatchWork::exception() const {
  for (const WorkPtr& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

bool BatchWork::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  std::exception_ptr first;
  for (const WorkPtr& work : works_) {
    // A timeout of 0 would mean none.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left());
    try {
      work->wait(timeout <= kNoTimeout ? kNoTimeout : std::max(left, kLeastTimeout));
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (isOfPython(error)) {  // raised by a signal's handler: no longer waits for messages
        first = error;
        for (const WorkPtr& other : works_) {
          if (auto* message = dynamic_cast<MessageWork*>(other.get()))
            message->cancel({ErrorCode::kAborted, "the wait for its batch was interrupted"});
        }
      }
      if (!first) first = error;
    }
  }
  if (first) std::rethrow_exception(first);
  return true;
}

std::vector<at::Tensor> BatchWork::result() {
  std::vector<at::Tensor> all;
  for (const WorkPtr& work : works_) {
    for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> BatchWork::getFuture() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
  for (const WorkPtr& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures)->then(
      [futures, results = result()](c10::ivalue::Future&) {
        for (const c10::intrusive_ptr<c10::ivalue::Future>& future : futures) (void)future->value();
        return c10::IValue(results);
      },
      type);
}

std::shared_ptr<Completions> BatchWork::completions() const {
  for (const WorkPtr& work : works_) {
    if (const auto* collective = dynamic_cast<const CollectiveWork*>(work.get()))
      return collective->completions();
    if (const auto* message = dynamic_cast<const MessageWork*>(work.get()))
      return message->completions();
  }
  return nullptr;
}

std::vector<int> BatchWork::lostRanks() const {
  std::set<int> ranks;
  for (const WorkPtr& work : works_) {
    for (const int rank : lostBy(*work)) ranks.insert(rank);
  }
  return {ranks.begin(), ranks.end()};
}

}  // namespace mooncake
