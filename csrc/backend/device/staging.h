#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "backend/calls/input_cut.h"
#include "backend/device/own_stream.h"
#include "base/deadline.h"
#include "base/failpoint.h"
#include "base/result.h"

namespace mooncake {

class Group;
class GroupStreams;

// One operation on tensors of a device. It works on copies in pinned host memory, and this class
// moves the data between the two, on a stream of the group. In the order of the calls:
//
//   mark()       the caller's stream has reached the operation here
//   fetch()      the inputs are in host memory; on the thread that runs the operation
//   giveBack()   the results are in host memory and may go to the device; on the same thread
//   block()      the caller's stream waits for the outputs
//
// An operation that ends without results is abandoned: then its outputs keep their contents.
//
// HostStaging works with every device that torch has streams and events for. StreamStaging needs
// streams that know words, and enqueues everything at the call. MessageStaging is for messages.
class Staging : public std::enable_shared_from_this<Staging> {
 public:
  // Drops tensors and events while their device is the current one: torch would make a context on
  // another device.
  virtual ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Each returns the copy of a tensor that operations on the host use in its place: contiguous,
  // with the tensor's shape and type. Throws if the tensor is of another device, or of a kind that
  // no operation takes. `what` names it in the error.
  at::Tensor input(const at::Tensor& tensor, const char* what) { return input(tensor, what, {}); }
  at::Tensor output(const at::Tensor& tensor, const char* what) { return output(tensor, what, {}); }
  at::Tensor inOut(const at::Tensor& tensor, const char* what);
  // Tells how many rows at the beginning of each block of a tensor [blocks, rows, ...] are used. The
  // others are not copied. An ordered staging enqueues the copy before it knows the numbers: it needs
  // a kernel for that, else it copies all rows.
  struct UsedRows {
    at::Tensor counts;     // of newCounts(). Not defined: all rows are copied
    bool areLast = false;  // the tensor is [blocks, any, rows], and only a kernel leaves rows out
  };
  at::Tensor input(const at::Tensor& tensor, const char* what, UsedRows used);
  at::Tensor output(const at::Tensor& tensor, const char* what, UsedRows used);
  // Returns int32 [blocks] of zeros in pinned memory. For inputs, they are set before the operation;
  // for outputs, by the operation, if it succeeds.
  at::Tensor newCounts(int64_t blocks);

  // Ends the group. Called if the device or its driver fails while the call is enqueued: then this
  // rank does not begin an operation that other ranks wait for. They must not take its next one for
  // that.
  using EndGroup = std::function<void(const Error&)>;
  void onFailure(EndGroup end) { endGroup_ = std::move(end); }

  // The operation takes its input as it comes, in pieces.
  void cutInputs(InputCut cut) { cut_ = std::move(cut); }
  bool isCut() const { return cut_.pieceBytes != 0; }
  const InputCut& cut() const { return cut_; }

  // kRecords: mark() records the operation into a graph, and does not run it. kReplays: a replay of
  // the graph waits for the operation, which this thread is to run.
  enum class Mode { kCalled, kRecords, kReplays };
  virtual Mode mode() const { return Mode::kCalled; }

  // Called once, after the copies were made and before the operation can begin. Throws; refuses a
  // stream whose calls are being recorded into a graph, but with kRecords.
  virtual void mark() = 0;
  // True: from mark() on, operations must begin in the order of their marks.
  virtual bool isOrdered() const = 0;
  // Waits on the host, of cut inputs for the first piece. kTimeout if earlier work of the caller's
  // stream takes longer than `limit`. Returns the group's error if that ends meanwhile. Throws
  // torch's errors.
  virtual Status fetch(Group& group) = 0;
  // For cut inputs, between fetch() and giveBack(). Waits until the first `bytes` of each part are
  // in host memory. The same errors.
  virtual Status awaitInput(Group& group, size_t bytes) const;
  // Copies the cut inputs again.
  virtual Status fetchAgain(Group&) {
    return {ErrorCode::kUnsupported, "this staging does not cut its inputs"};
  }
  // Thread-safe. Later calls do nothing, and neither do calls of abandon().
  virtual void giveBack() = 0;
  virtual void abandon() = 0;
  // True once the device has the outputs.
  virtual bool isOver() const = 0;
  // Makes the current stream of the device wait for the outputs. If canBlockEarly() is false, the
  // operation must have ended.
  virtual void block() = 0;
  virtual bool canBlockEarly() const { return isOrdered(); }
  // Gives the results of a message that has ended back, or abandons it. Other operations do both
  // themselves.
  virtual void settle() {}
  // Waits on the host for the outputs, once they were given back: for copies on our stream.
  virtual void synchronize() const = 0;

  const c10::Stream& stream() const { return stream_; }
  GroupStreams& streams() const { return *streams_; }
  const std::shared_ptr<GroupStreams>& sharedStreams() const { return streams_; }

 protected:
  // `stream`: the one of `streams` for the copies.
  Staging(std::shared_ptr<GroupStreams> streams, const c10::Stream& stream,
          std::chrono::milliseconds limit)
      : streams_(std::move(streams)),
        stream_(stream),
        limit_(limit),
        last_(std::make_shared<DeviceStream>(OwnStream::nativeOf(stream))) {}

  // Marks the position of the caller's stream.
  void markReached();
  // Runs a part of enqueuing the call, and ends the group if it throws.
  void enqueue(const std::function<void()>& part) const;
  // For destructors: drops something while the device is the current one, if it can be that.
  void dropOnDevice(const std::function<void()>& drop) const noexcept;
  const c10::Event& reached() const { return *reached_; }
  // Waits on the host until the caller's stream has reached the operation.
  Status awaitReached(Group& group) const;
  // Returns the memory for a tensor's copy, on the host unless the staging says otherwise.
  virtual at::Tensor emptyOnHost(const at::Tensor& tensor);
  std::chrono::milliseconds limit() const { return limit_; }
  // Enqueues the copies to or from the host on a stream.
  void copyIn(const c10::Stream& stream);
  void copyOut() const { copyOut(stream_); }
  void copyOut(const c10::Stream& stream) const;
  // On a stream that waits for nothing.
  Status fetchAgainOn(const c10::Stream& stream, Group& group) const;
  // Enqueues the copies of all inputs, in one piece.
  void copyInputs(const c10::Stream& stream) const;
  // The copies of the next piece are enqueued.
  virtual void onPiece(const c10::Stream& stream);
  // True: there are inputs, and they are cut.
  bool comesInPieces() const { return isCut() && hasInputs_; }
  // Returns the number of the `all` pieces in which the first `bytes` of each part are. A part of
  // another rank may be longer.
  size_t piecesOf(size_t bytes, size_t all) const {
    return std::min((bytes + cut_.pieceBytes - 1) / cut_.pieceBytes, all);
  }
  // The copies in host memory are used on this stream from now on, and not on stream().
  void useLast(const DeviceStream& stream) { *last_ = stream; }
  const std::shared_ptr<DeviceStream>& last() const { return last_; }
  // Enqueues copies of the outputs' present contents, to the host.
  void keepOutputs(const c10::Stream& stream) const;
  // Enqueues zeros for the copies of the outputs.
  void clearOutputs(const c10::Stream& stream) const;
  bool hasOutputs() const { return hasOutputs_; }
  // Drops the tensors, once every copy is enqueued. The allocators keep the memory for the streams.
  void forgetTensors() { copies_.clear(); }
  // Keeps the places of the tensors' memory on the device, but does not own it any more.
  void forgetOwners();
  c10::Stream callersStream() const;
  // Waits on the host for a condition, for as long as the limit says.
  Status awaitOnHost(Group& group, const std::function<bool()>& ready) const;

 private:
  struct Copy {
    at::Tensor device;
    at::Tensor host;
    bool isInput = false;
    bool isOutput = false;
    UsedRows used;
  };

  at::Tensor add(const at::Tensor& tensor, const char* what, bool isInput, bool isOutput,
                 UsedRows used);
  // Calls visit(device, host) for each part of the tensor that is copied.
  template <typename Visit>
  void forParts(const Copy& copy, const Visit& visit) const;
  bool isByKernel(const Copy& copy) const;
  void copyUsedRows(const Copy& copy, const c10::Stream& stream, bool toHost) const;
  // Both enqueue on `stream`, which is the current one.
  void copyToHost(const Copy& copy, const c10::Stream& stream) const;
  void copyToDevice(const Copy& copy, const c10::Stream& stream) const;
  // Returns the parts of all cut inputs, each as one row: on the device, and on the host.
  std::vector<std::pair<at::Tensor, at::Tensor>> cutParts() const;
  void copyPieces(const c10::Stream& stream);
  Error lateError(const Group& group) const;

  const std::shared_ptr<GroupStreams> streams_;
  const c10::Stream stream_;
  const std::chrono::milliseconds limit_;
  std::vector<Copy> copies_;
  bool hasInputs_ = false;
  bool hasOutputs_ = false;
  EndGroup endGroup_;
  std::optional<c10::Event> reached_;
  InputCut cut_;
  std::vector<c10::Event> pieces_;  // copied
  // The stream that uses the copies last, if an accelerator drives the device.
  const std::shared_ptr<DeviceStream> last_;
};

// The error of an operation when torch cannot copy its inputs.
Error cannotFetch(const Staging& staging, const std::exception& why);

// Runs an operation between fetch() and giveBack(). If it ends without results, or never runs, the
// staging is abandoned.
class StagedTurn {
 public:
  explicit StagedTurn(std::shared_ptr<Staging> staging) : staging_(std::move(staging)) {}
  ~StagedTurn() { staging_->abandon(); }
  StagedTurn(const StagedTurn&) = delete;
  StagedTurn& operator=(const StagedTurn&) = delete;

  // If the inputs cannot be had, this rank does not begin an operation that other ranks wait for.
  // They must not take its next one for that, so the group ends here.
  template <typename Run>
  Status run(Group& group, const Run& operation) {
    const Status fetched = fetchOrFail(group);
    failpoint("stage-fetched");
    Status status = fetched.ok() ? operation() : fetched;
    failpoint("stage-ran");
    status = end(std::move(status));
    failpoint("stage-given-back");
    return status;
  }
  // The two halves of run(), for operations that end with an error on all ranks if the inputs of
  // one cannot be had. Neither throws.
  Status fetch(Group& group);
  // Gives the results back if the status is ok, else abandons them. Returns how that went.
  Status end(Status status);

 private:
  Status fetchOrFail(Group& group);

  const std::shared_ptr<Staging> staging_;
};

}  // namespace mooncake
