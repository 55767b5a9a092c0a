#pragma once

#include <memory>
#include <optional>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/calls/collective.h"
#include "backend/coalescing.h"
#include "base/deadline.h"
#include "base/result.h"

namespace mooncake {

class PeerSharing;

// The calls of a group with tensors of devices. A function for a call returns nullopt if these have
// no part in it: the call is then the host's, which also checks its arguments.
class DeviceHalf {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  virtual ~DeviceHalf() = default;

  // `call`: its timeout is set.
  virtual std::optional<WorkPtr> carryOut(const Collective& call) = 0;
  // Also waits for the work of the caller's stream: on the device that the options name, else on
  // the stream of the group's last call with tensors of a device.
  virtual std::optional<WorkPtr> barrier(const c10d::BarrierOptions& opts) = 0;
  // A message, which goes once the caller's stream has come to the call.
  virtual std::optional<WorkPtr> post(c10d::OpType type, const Tensors& tensors, int peer,
                                      int tag) = 0;
  // Returns the work of a batch that has ended. `host`: the work of its calls on host memory.
  virtual WorkPtr ofBatch(Coalescing::Batch& batch, WorkPtr host) = 0;

  // Makes the group that shares memory of the device, or returns the one that there is. Collective.
  virtual std::shared_ptr<PeerSharing> sharing(const c10::Device& device) = 0;
  // Ok, or why the group cannot go on with other members: it has kernels, graphs or shared memory
  // that hold the present ones.
  virtual Status mayMove() = 0;
  // Waits until work of devices that no operation on the host waits for has ended, or for the
  // deadline.
  virtual void drain(Deadline deadline) = 0;
  // Ends kernels that wait for other ranks.
  virtual void fail(const Error& why) = 0;
  // The group has been left in good order. Logs an error that no call has raised.
  virtual void left() = 0;
};

}  // namespace mooncake
