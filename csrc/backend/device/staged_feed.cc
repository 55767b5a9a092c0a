#include "backend/device/staged_feed.h"

#include <exception>

#include "backend/device/staging.h"

namespace mooncake {

Status StagedFeed::orFail(const std::function<Status()>& copy) {
  Status status;
  try {
    status = copy();
  } catch (const std::exception& error) {
    status = cannotFetch(*staging_, error);
  }
  if (!status.ok()) group_.fail(status.error());
  return status;
}

Status StagedFeed::await(size_t bytes) {
  return orFail([&] { return staging_->awaitInput(group_, bytes); });
}

Status StagedFeed::restart() {
  return orFail([&] { return staging_->fetchAgain(group_); });
}

}  // namespace mooncake
