#include "wires/nic/libfabric/endpoint.h"

#include <string>
#include <string_view>
#include <unistd.h>

#include "base/log.h"
#include "base/signal_handlers.h"
#include "base/signals.h"

namespace mooncake {
namespace {

constexpr size_t kMostAddressBytes = 256;

void closeAndForget(auto*& object) {
  if (object == nullptr) return;
  if (const int result = ::fi_close(&object->fid); result != 0)
    log(LogLevel::kInfo, "fabric", "fi_close: ", -result);
  object = nullptr;
}

}  // namespace

Result<std::unique_ptr<LibfabricEndpoint>> LibfabricEndpoint::open(
    std::shared_ptr<const LibfabricLibrary> library, FabricInfo info) {
  std::unique_ptr<LibfabricEndpoint> made(
      new LibfabricEndpoint(std::move(library), std::move(info)));
  KeptSignalHandlers kept;
  BlockedSignals blocked;  // providers start threads, which must not take signals
  MOONCAKE_TRY(made->make());
  return made;
}

LibfabricEndpoint::~LibfabricEndpoint() {
  closeEndpoint();
  closeAndForget(completions_);
  closeAndForget(addresses_);
  closeAndForget(domain_);
  closeAndForget(fabric_);
}

void LibfabricEndpoint::closeEndpoint() { closeAndForget(endpoint_); }

Status LibfabricEndpoint::make() {
  if (const int r = library_->fabric(info_->fabric_attr, &fabric_, nullptr))
    return failed("fi_fabric", r);
  if (const int r = ::fi_domain(fabric_, info_.get(), &domain_, nullptr))
    return failed("fi_domain", r);
  fi_av_attr addresses{};
  addresses.type = info_->domain_attr->av_type;
  if (const int r = ::fi_av_open(domain_, &addresses, &addresses_, nullptr))
    return failed("fi_av_open", r);
  MOONCAKE_TRY(openCompletions());
  if (const int r = ::fi_endpoint(domain_, info_.get(), &endpoint_, nullptr))
    return failed("fi_endpoint", r);
#if FI_MAJOR_VERSION > 1 || FI_MINOR_VERSION >= 20
  // Turns off the provider's own path within a host, if the provider knows this option.
  // FI_EFA_ENABLE_SHM_TRANSFER does so for older ones.
  bool isPermitted = false;
  ::fi_setopt(&endpoint_->fid, FI_OPT_ENDPOINT, FI_OPT_SHARED_MEMORY_PERMITTED, &isPermitted,
              sizeof(isPermitted));
#endif
  if (const int r = ::fi_ep_bind(endpoint_, &addresses_->fid, 0)) return failed("fi_ep_bind", r);
  if (const int r = ::fi_ep_bind(endpoint_, &completions_->fid, FI_TRANSMIT | FI_RECV))
    return failed("fi_ep_bind", r);
  if (const int r = ::fi_enable(endpoint_)) {
    Status why = failed("fi_enable", r);
    if (r != -FI_EBUSY || info_->fabric_attr->prov_name != std::string_view("shm")) return why;
    return {ErrorCode::kSystem,
            why.error().message + ": /dev/shm has an endpoint of process number " +
                std::to_string(::getpid()) +
                " already, of another container that shares /dev/shm or of one that was killed. "
                "Give each container a /dev/shm of its own, remove the file that begins with this "
                "number, or leave shm out of MOONCAKE_FABRIC_PROVIDERS"};
  }
  return readAddress();
}

Status LibfabricEndpoint::openCompletions() {
  fi_cq_attr attributes{};
  attributes.size = info_->tx_attr->size + info_->rx_attr->size;
  attributes.format = FI_CQ_FORMAT_MSG;
  attributes.wait_obj = FI_WAIT_FD;
  if (::fi_cq_open(domain_, &attributes, &completions_, nullptr) == 0) {
    if (::fi_control(&completions_->fid, FI_GETWAIT, &waitDescriptor_) == 0) return {};
    waitDescriptor_ = -1;
    closeAndForget(completions_);
  }
  attributes.wait_obj = FI_WAIT_NONE;
  if (const int r = ::fi_cq_open(domain_, &attributes, &completions_, nullptr))
    return failed("fi_cq_open", r);
  return {};
}

Status LibfabricEndpoint::readAddress() {
  size_t length = kMostAddressBytes;
  address_.resize(length);
  if (const int r = ::fi_getname(&endpoint_->fid, address_.data(), &length))
    return failed("fi_getname", r);
  address_.resize(length);
  return {};
}

Status LibfabricEndpoint::failed(const char* call, int result) const {
  return {ErrorCode::kSystem, std::string(call) + " of provider " + info_->fabric_attr->prov_name +
                                  ": " + library_->strerror(-result)};
}

}  // namespace mooncake
