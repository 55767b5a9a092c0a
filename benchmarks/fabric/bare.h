#pragma once

#include <atomic>
#include <memory>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <span>
#include <vector>

#include "fabric/crew.h"
#include "fabric/station.h"
#include "wires/nic/fabric_env.h"

namespace mooncake::bench {

// The provider alone: fi_write, fi_read, fi_send and fi_cq_read in a loop, without our code. It is
// the ceiling for a Nic.
class Bare {
 public:
  // Uses the station's memory: both move the same pages, because the cost of a copy depends on
  // where they lie.
  Bare(Crew& crew, const FabricEnv& env, Station& station, bool spins);
  ~Bare();

  double stream(Verb verb, size_t bytes, size_t depth, double seconds);
  void attend();

 private:
  void poll(std::vector<size_t>* ended);
  void postReceive(size_t i);
  ssize_t write(std::byte* from, size_t bytes, uint64_t offset, void* context);

  Crew& crew_;
  bool spins_;  // false: sleeps in fi_cq_sread, if the provider can
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* addresses_ = nullptr;
  fid_cq* completions_ = nullptr;
  fid_ep* endpoint_ = nullptr;
  fid_mr* region_ = nullptr;
  const std::span<std::byte> memory_, inbox_;
  std::vector<fi_context2> contexts_, receiveContexts_;
  fi_addr_t peer_ = 0;
  uint64_t remoteAddress_ = 0, remoteKey_ = 0;
  bool isReceiving_ = false;
};

}  // namespace mooncake::bench
