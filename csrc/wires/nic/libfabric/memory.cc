#include "wires/nic/libfabric/memory.h"

#include <algorithm>
#include <string>

#include "base/crypto.h"

namespace mooncake {

class LibfabricMemories::Memory final : public NicMemory {
 public:
  Memory(std::shared_ptr<LibfabricMemories> owner, std::span<std::byte> memory, fid_mr* region,
         NicKey key)
      : owner_(std::move(owner)),
        memory_(memory),
        key_(key),
        region_(region),
        descriptor_(::fi_mr_desc(region)) {}
  ~Memory() override {
    Lock lock(owner_->mutex_);
    if (owner_->open_.erase(region_) != 0) ::fi_close(&region_->fid);
  }
  std::span<std::byte> memory() const override { return memory_; }
  NicKey key() const override { return key_; }
  void* descriptor() const { return descriptor_; }

 private:
  const std::shared_ptr<LibfabricMemories> owner_;
  const std::span<std::byte> memory_;
  const NicKey key_;
  fid_mr* const region_;
  void* const descriptor_;
};

void* LibfabricMemories::descriptorOf(const NicMemory& memory) {
  return static_cast<const Memory&>(memory).descriptor();
}

Result<std::unique_ptr<NicMemory>> LibfabricMemories::add(std::span<std::byte> memory,
                                                          uint32_t access) {
  const NicMemoryPlace place = places_.of(memory.data());
  Lock lock(mutex_);
  if (isClosed_) return Error{ErrorCode::kAborted, "the network card is closed"};
  const fi_info& info = endpoint_.info();
  if (place.isCuda && (info.caps & FI_HMEM) == 0) {
    return Error{ErrorCode::kUnsupported,
                 std::string("provider ") + info.fabric_attr->prov_name +
                     " moves bytes with the processor, which cannot reach GPU memory"};
  }
  auto region = make(memory, access, place);
  if (!region.ok()) return region.error();
  const bool isByAddress = (info.domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  const NicKey key{.key = ::fi_mr_key(*region),
                   .base = isByAddress ? reinterpret_cast<uint64_t>(memory.data()) : 0};
  open_.insert(*region);
  return std::unique_ptr<NicMemory>(
      std::make_unique<Memory>(shared_from_this(), memory, *region, key));
}

Result<fid_mr*> LibfabricMemories::make(std::span<std::byte> memory, uint32_t access,
                                        NicMemoryPlace place) {
  const auto has = [&](NicAccess right) { return (access & static_cast<uint32_t>(right)) != 0; };
  const iovec range{memory.data(), memory.size()};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = FI_SEND | FI_RECV | FI_READ | FI_WRITE |
                      (has(NicAccess::kRemoteRead) ? FI_REMOTE_READ : 0) |
                      (has(NicAccess::kRemoteWrite) ? FI_REMOTE_WRITE : 0);
  if (place.isCuda) {
    attributes.iface = FI_HMEM_CUDA;
    attributes.device.cuda = place.device;
  }
  const int mode = endpoint_.info().domain_attr->mr_mode;
  constexpr int kTries = 8;  // two equal numbers of 64 bits are rare, of 32 they are not
  fid_mr* region = nullptr;
  int result = 0;
  for (int i = 0; i < kTries; ++i) {
    if ((mode & FI_MR_PROV_KEY) == 0) attributes.requested_key = randomKey();
    result = ::fi_mr_regattr(endpoint_.domain(), &attributes, 0, &region);
    if (result != -FI_ENOKEY) break;
  }
  if (result == 0 && (mode & FI_MR_ENDPOINT) != 0) {
    result = ::fi_mr_bind(region, &endpoint_.endpoint()->fid, 0);
    if (result == 0) result = ::fi_mr_enable(region);
    if (result != 0) ::fi_close(&region->fid);
  }
  if (result == 0) return region;
  const bool isFull = result == -FI_ENOMEM || result == -FI_ENOSPC;
  return Error{isFull ? ErrorCode::kExhausted : ErrorCode::kSystem,
               "fi_mr_regattr of " + std::to_string(memory.size()) +
                   " bytes: " + endpoint_.library().strerror(-result)};
}

// A key that cannot be guessed: only a peer that received it can read or write our memory.
uint64_t LibfabricMemories::randomKey() const {
  const Nonce random = Crypto::randomNonce();
  uint64_t key = 0;
  const size_t bytes = std::min(sizeof(key), endpoint_.info().domain_attr->mr_key_size);
  std::memcpy(&key, random.data(), bytes);
  return key;
}

void LibfabricMemories::closeAll() {
  Lock lock(mutex_);
  isClosed_ = true;
  for (fid_mr* region : open_) ::fi_close(&region->fid);
  open_.clear();
}

}  // namespace mooncake
