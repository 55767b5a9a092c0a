#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "backend/device/kernel_calls.h"
#include "base/deadline.h"
#include "peers/peer_tokens.h"

namespace mooncake {

class EpWork;
class TokenKernels;

// A dispatch by kernels, for the combines of its rows, and for dispatches that go the same way.
struct TokenHandle {
  std::shared_ptr<TokenKernels> kernels;
  PeerTokens::Shape shape;
  uint64_t number = 0;  // of the call: the same on all ranks
  int64_t tokens = 0, capacity = 0, hidden = 0;
  at::Tensor choices;        // int32 [tokens][width][2]
  at::Tensor counts;         // int32 [ranks]
  at::Tensor sources, ends;  // int32 [capacity], [ranks]
  at::Tensor dispatched;     // kernels::Dispatched, as bytes
};

// The calls of the normal mode with tensors of a device, as kernels, if all ranks can. The ranks
// decide that together, at the first such call. Calls come from one thread, and are enqueued behind
// the current stream's work so far. Functions throw.
class TokenKernels : public std::enable_shared_from_this<TokenKernels> {
 public:
  struct Settings {
    std::string name;  // of the buffer, for the log
    size_t bytes = 0;  // of rows that a rank publishes for one piece
    std::chrono::milliseconds timeout{};
    bool blocks = false;  // wait() waits on the host
  };
  TokenKernels(KernelControl control, Settings settings);
  // Waits until the kernels of all calls have ended: results stay valid.
  ~TokenKernels();

  // Whether calls with tensors of this device go by kernels. Collective, the first time.
  bool takes(const c10::Device& device);
  bool areOn(const c10::Device& device) const { return tokens_ && stream().device() == device; }

  // The common part of all calls.
  struct Call {
    uint64_t among = 0;                     // bits of the ranks that the call counts as active
    std::optional<at::Tensor> activeRanks;  // int32 [ranks], read and written
    Clock::duration limit{};                // a call that takes longer ends the buffer's calls
    bool waits = true;                      // the current stream waits for the results
  };
  struct Fields {
    std::vector<at::Tensor> given;  // [tokens][any]
    std::vector<at::Tensor> made;   // [capacity][any]
    uint32_t agreed = 0;            // any number; the same on all ranks
  };
  // The results are in `fields`, in `handle`, and in `table`: int32 [ranks][ranks + 1], of each rank
  // its rows for each rank, and its tokens. `weights`: of a row, for which the combine needs room.
  std::shared_ptr<EpWork> dispatch(const Call& call, const Fields& fields, TokenHandle& handle,
                                   const at::Tensor& table, int64_t weights);
  // The rows take the places of the handle's dispatch. Those of ranks that have gone are zeros.
  std::shared_ptr<EpWork> dispatchAgain(const Call& call, const Fields& fields,
                                        const TokenHandle& handle);
  struct Sums {
    at::Tensor x;                          // bfloat16 [capacity or more][hidden]
    std::optional<at::Tensor> weights;     // float32 [capacity or more][any]
    std::vector<at::Tensor> biases;        // bfloat16 [tokens][hidden]
    at::Tensor sums, missing;              // bfloat16 [tokens][hidden], bool [tokens]
    std::optional<at::Tensor> weightSums;  // float32 [tokens][any]
  };
  std::shared_ptr<EpWork> combine(const Call& call, const Sums& sums, const TokenHandle& handle);

  // The stream of the kernels.
  const c10::Stream& stream() const { return calls_.stream(); }
  // Ends the calls of all ranks with this error.
  void fail(Error why);
  // Waits until the kernels of all calls have ended, or for the deadline.
  void close(Deadline deadline);

 private:
  PeerTokens::Caller callerOf(const Call& call, const TokenHandle& handle) const;
  template <typename Send>
  std::shared_ptr<EpWork> submit(const Call& call, std::vector<at::Tensor> tensors,
                                 const Send& send);

  KernelControl control_;  // until it is decided
  const Settings settings_;
  at::Tensor mask_;  // on the device, read by kernels: bits of all ranks
  KernelCalls calls_;
  std::unique_ptr<PeerTokens> tokens_;  // null: calls are staged
};

}  // namespace mooncake
