#include "collectives/fed_pieces.h"

#include <algorithm>
#include <memory>

#include "base/failpoint.h"

namespace mooncake {

Status runFed(Group& group, Call call, InputFeed& feed, size_t partBytes, size_t pieceBytes,
              OnLoss onLoss, const RunPiece& run) {
  // A rank without a feed works with other pieces, and must not take part.
  // Of a call with parts for some ranks, `tensors` is the number of these.
  call.lengths = uint32_t(pieceBytes + call.tensors);
  call.tensors = 1;
  std::shared_ptr<const GroupView> contributors;
  for (size_t begin = 0; begin < partBytes;) {
    const size_t bytes = std::min(pieceBytes, partBytes - begin);
    MOONCAKE_TRY(feed.await(begin + bytes));
    call.goesOn = begin + bytes < partBytes;
    MOONCAKE_TRY(run(call, begin, bytes));
    failpoint("fed-piece");
    begin += bytes;
    if (!contributors) contributors = group.lastView;
    if (onLoss == OnLoss::kGoOn || group.lastView->active == contributors->active) continue;
    contributors = nullptr;
    begin = 0;
    if (onLoss == OnLoss::kRestoreAndRunAgain) MOONCAKE_TRY(feed.restart());
  }
  return {};
}

}  // namespace mooncake
