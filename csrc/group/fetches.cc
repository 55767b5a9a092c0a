#include "group/fetches.h"

#include <array>

#include "base/failpoint.h"
#include "group/operation.h"

namespace mooncake {
namespace {

constexpr size_t kMostAtOnce = 32;  // requests in one call of a channel

}  // namespace

Fetches::Fetches(Operation& op) : op_(op), completion_(&op.group().window().bell()) {}

Fetches::~Fetches() {
  if (!completion_.finished()) op_.group().window().cancel(completion_);
}

Status Fetches::start(int rank, const RemoteRegion& region, std::span<const Piece> pieces) {
  const Group& group = op_.group();
  std::array<GetRequest, kMostAtOnce> gets;
  size_t count = 0;
  const auto ask = [&]() -> Status {
    if (count == 0) return {};
    failpoint("fetch");
    auto started = group.window().get(rank, std::span(gets).first(std::exchange(count, 0)));
    return started.ok() ? Status() : op_.explain(started.error());
  };
  for (const auto& [offset, target] : pieces) {
    if (target.empty()) continue;
    if (offset > region.bytes || target.size() > region.bytes - offset) {
      return {ErrorCode::kProtocol, group.nameRank(rank) + " announced " +
                                        std::to_string(region.bytes) + " bytes, but " +
                                        std::to_string(offset + target.size()) +
                                        " are due: do all ranks run the same version?"};
    }
    gets[count++] = {region, offset, target, &completion_};
    if (count == gets.size()) MOONCAKE_TRY(ask());
  }
  return ask();
}

Status Fetches::await() {
  const auto waited = op_.waitUntil([&] { return completion_.finished(); });
  if (waited.code() == ErrorCode::kTimeout) return op_.dataTimedOut();
  MOONCAKE_TRY(waited);
  const ErrorCode code = completion_.error.load(std::memory_order_acquire);
  if (code == ErrorCode::kOk) return {};
  return op_.explain({code, std::string("fetching failed (") + errorCodeName(code) + ")"});
}

}  // namespace mooncake
