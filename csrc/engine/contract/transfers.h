#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>

#include "base/deadline.h"
#include "base/result.h"
#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// What a channel moves between long-lived memory here and at the peer. Any thread; no call waits for
// the peer.
class Transfers {
 public:
  virtual ~Transfers() = default;

  // Writes data into the peer's memory, and then the signal. Two puts have no order, except that
  // puts with the same signal word land one after the other: a slot may be put again while its last
  // put is under way.
  virtual Status put(const PutRequest& request) = 0;
  // Fetches. Each get that returned ok ends its completion exactly once, even if the channel
  // breaks.
  virtual Status get(const GetRequest& request) = 0;
  // Writes. Its completion ends as a get's does. There is no order between two writes, or
  // between writes and puts. If the range is not all inside the region, no byte is written.
  virtual Status write(const WriteRequest& request) = 0;
  // The same, and stamps the word when the bytes are there, before the completion ends. This is a
  // put whose data is not copied. Only where hasCards(), else kUnsupported.
  virtual Status write(const WriteRequest&, const RemoteSignal&) {
    return {ErrorCode::kUnsupported, "this wire announces no writes"};
  }
  // The same for several requests, which makes small ones cheaper. After an error none of them has
  // begun. If some have begun and another cannot, its completion ends with the reason.
  virtual Status get(std::span<const GetRequest> requests) { return beginAll(requests); }
  virtual Status write(std::span<const WriteRequest> requests) { return beginAll(requests); }
  // Ends the gets and writes under way that count at this completion with kAborted. One of them may
  // still end well at the same time. Returns when none of them touches its target or source any
  // more. Bytes of a write that were already sent may still land.
  virtual void cancel(const Completion* completion) = 0;
  // Asks the peer to withdraw the keys that its cards granted for `region`. Afterwards no part of a
  // cancelled write lands there. Returns a number for isRetired().
  virtual uint64_t retire(const RemoteRegion&) { return 0; }
  // Whether the peer has confirmed it. Also true once the channel is closed or was made again, or
  // either end has fenced the other. False while the connection is broken.
  virtual bool isRetired(uint64_t) { return true; }
  // Does ahead of time the setup that the first transfer would wait for, between these regions of
  // the peer's and long-lived memory here. `done` runs once, on any thread, by the deadline or when
  // the channel ends. It must not block or call the channel.
  virtual void warmUp(std::span<const RemoteRegion>, Deadline, std::function<void(Status)> done) {
    done({});
  }
  // Returns whether network cards move bytes by themselves between long-lived memory here and
  // there. If so, copying large data into such memory is cheaper than sending it in packets.
  virtual bool hasCards() const { return false; }
  // Returns whether both ends map memory of devices that the other registers, where a device can.
  // Constant for the channel's life.
  virtual bool mapsDevices() const { return false; }

 protected:
  template <typename Request>
  Status beginAll(std::span<const Request> requests);
};

template <typename Request>
Status Transfers::beginAll(std::span<const Request> requests) {
  for (size_t i = 0; i < requests.size(); ++i) {
    Status begun;
    if constexpr (std::is_same_v<Request, GetRequest>) {
      begun = get(requests[i]);
    } else {
      begun = write(requests[i]);
    }
    if (begun.ok()) continue;
    if (i == 0) return begun;
    requests[i].completion->begin();
    requests[i].completion->end(begun.code());
  }
  return {};
}

}  // namespace mooncake
