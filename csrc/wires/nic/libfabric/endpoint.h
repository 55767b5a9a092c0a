#pragma once

#include <memory>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include "base/bytes.h"
#include "base/result.h"
#include "wires/nic/libfabric/enumerate.h"

namespace mooncake {

// The libfabric objects of one card: one of each kind, created together, and closed in the only
// order that works. Peers are entries of the address table; they need no endpoints of their own.
class LibfabricEndpoint {
 public:
  // kUnsupported, kSystem: the message names the call that failed.
  static Result<std::unique_ptr<LibfabricEndpoint>> open(
      std::shared_ptr<const LibfabricLibrary> library, FabricInfo info);
  ~LibfabricEndpoint();
  LibfabricEndpoint(const LibfabricEndpoint&) = delete;
  LibfabricEndpoint& operator=(const LibfabricEndpoint&) = delete;

  // When this returns, no byte moves any more: operations under way are over.
  void closeEndpoint();

  const fi_info& info() const { return *info_; }
  const LibfabricLibrary& library() const { return *library_; }
  fid_fabric* fabric() const { return fabric_; }
  fid_domain* domain() const { return domain_; }
  fid_av* addresses() const { return addresses_; }
  fid_cq* completions() const { return completions_; }
  fid_ep* endpoint() const { return endpoint_; }
  int waitDescriptor() const { return waitDescriptor_; }  // -1: this provider has none
  const Bytes& address() const { return address_; }

 private:
  LibfabricEndpoint(std::shared_ptr<const LibfabricLibrary> library, FabricInfo info)
      : library_(std::move(library)), info_(std::move(info)) {}
  Status make();
  Status openCompletions();
  Status readAddress();
  Status failed(const char* call, int result) const;

  const std::shared_ptr<const LibfabricLibrary> library_;
  const FabricInfo info_;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* addresses_ = nullptr;
  fid_cq* completions_ = nullptr;
  fid_ep* endpoint_ = nullptr;
  int waitDescriptor_ = -1;
  Bytes address_;
};

}  // namespace mooncake
