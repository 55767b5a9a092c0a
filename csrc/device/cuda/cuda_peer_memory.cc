#include "device/cuda/cuda_peer_memory.h"

#include <string>
#include <utility>

#include "device/cuda/cuda_scope.h"

namespace mooncake {
namespace {

std::string named(const char* function, size_t bytes) {
  return std::string(function) + " of " + std::to_string(bytes) + " bytes";
}

}  // namespace

Status CudaPeerMemory::checkSharing(int device) {
  const auto hasVirtual =
      contexts_.attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
  if (!hasVirtual.ok()) return hasVirtual.error();
  const auto hasDescriptors =
      contexts_.attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
  if (!hasDescriptors.ok()) return hasDescriptors.error();
  if (*hasVirtual != 0 && *hasDescriptors != 0) return {};
  return {ErrorCode::kUnsupported,
          "cuda: device " + std::to_string(device) + " cannot share memory with other processes: " +
              (*hasVirtual == 0 ? "its driver has no virtual memory management for it"
                                : "its driver hands no memory over by file descriptors")};
}

Result<CUmemAllocationProp> CudaPeerMemory::propertiesOf(int device) {
  const auto reach =
      contexts_.attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
  if (!reach.ok()) return reach.error();
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  properties.allocFlags.gpuDirectRDMACapable = *reach != 0;
  return properties;
}

Result<PeerMemory::Allocation> CudaPeerMemory::allocateShared(int device, size_t bytes) {
  if (bytes == 0)
    return Error{ErrorCode::kInvalidArgument, "cuda: an allocation of 0 bytes of shared memory"};
  MOONCAKE_TRY(checkSharing(device));
  const auto context = contexts_.inUse(device);
  if (!context.ok()) return context.error();
  const CudaScope scope(contexts_, device, *context);
  MOONCAKE_TRY(scope.status());
  const auto properties = propertiesOf(device);
  if (!properties.ok()) return properties.error();
  size_t unit = 0;
  MOONCAKE_TRY(contexts_.check("cuMemGetAllocationGranularity", device,
                               driver().cuMemGetAllocationGranularity(
                                   &unit, &*properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM)));
  const size_t rounded = (bytes + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle = 0;
  MOONCAKE_TRY(contexts_.check(named("cuMemCreate", rounded).c_str(), device,
                               driver().cuMemCreate(&handle, rounded, &*properties, 0)));
  auto shared = share(handle, rounded, device);
  // From here on the mapping and the descriptor keep the memory.
  driver().cuMemRelease(handle);
  return shared;
}

Result<PeerMemory::Allocation> CudaPeerMemory::share(CUmemGenericAllocationHandle handle,
                                                     size_t bytes, int device) {
  int number = -1;
  MOONCAKE_TRY(contexts_.check("cuMemExportToShareableHandle", device,
                               driver().cuMemExportToShareableHandle(
                                   &number, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)));
  Fd descriptor(number);
  const auto start = reserveAndMap(handle, bytes, device);
  if (!start.ok()) return start.error();
  return Allocation{.memory = add(*start, bytes, device), .descriptor = std::move(descriptor)};
}

Result<std::span<std::byte>> CudaPeerMemory::mapShared(const Fd& descriptor, size_t bytes,
                                                       int device) {
  MOONCAKE_TRY(checkSharing(device));
  const auto context = contexts_.inUse(device);
  if (!context.ok()) return context.error();
  const CudaScope scope(contexts_, device, *context);
  MOONCAKE_TRY(scope.status());
  CUmemGenericAllocationHandle handle = 0;
  MOONCAKE_TRY(
      contexts_.check("cuMemImportFromShareableHandle", device,
                      driver().cuMemImportFromShareableHandle(
                          &handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.get())),
                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)));
  const auto start = reserveAndMap(handle, bytes, device);
  driver().cuMemRelease(handle);
  if (!start.ok()) return start.error();
  return add(*start, bytes, device);
}

Result<CUdeviceptr> CudaPeerMemory::reserveAndMap(CUmemGenericAllocationHandle handle, size_t bytes,
                                                  int device) {
  CUdeviceptr start = 0;
  MOONCAKE_TRY(contexts_.check(named("cuMemAddressReserve", bytes).c_str(), device,
                               driver().cuMemAddressReserve(&start, bytes, 0, 0, 0)));
  const Status mapped = contexts_.check(named("cuMemMap", bytes).c_str(), device,
                                        driver().cuMemMap(start, bytes, 0, handle, 0));
  if (!mapped.ok()) {
    driver().cuMemAddressFree(start, bytes);
    return mapped.error();
  }
  const Status given = giveAccess(start, bytes, device);
  if (given.ok()) return start;
  (void)takeOut(start, {.bytes = bytes, .device = device});  // the first error is the cause
  return given.error();
}

Status CudaPeerMemory::giveAccess(CUdeviceptr start, size_t bytes, int device) {
  CUmemAccessDesc access{};
  access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult result = driver().cuMemSetAccess(start, bytes, &access, 1);
  const Status status = contexts_.check("cuMemSetAccess", device, result);
  if (result != CUDA_ERROR_INVALID_DEVICE && result != CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
    return status;
  return {ErrorCode::kUnsupported,
          status.error().message + ". Device " + std::to_string(device) +
              " does not reach memory of the other device: `nvidia-smi topo -p2p rw` shows which "
              "devices do"};
}

std::span<std::byte> CudaPeerMemory::add(CUdeviceptr start, size_t bytes, int device) {
  Lock lock(mutex_);
  mappings_[start] = {.bytes = bytes, .device = device};
  return {reinterpret_cast<std::byte*>(start), bytes};
}

Status CudaPeerMemory::takeOut(CUdeviceptr start, const Mapping& mapping) {
  MOONCAKE_TRY(
      contexts_.check("cuMemUnmap", mapping.device, driver().cuMemUnmap(start, mapping.bytes)));
  return contexts_.check("cuMemAddressFree", mapping.device,
                         driver().cuMemAddressFree(start, mapping.bytes));
}

Status CudaPeerMemory::unmapShared(std::span<std::byte> memory) {
  MOONCAKE_TRY(contexts_.checkProcess());  // before the lock: another thread may have held it
  const auto start = reinterpret_cast<CUdeviceptr>(memory.data());
  Mapping mapping;
  {
    Lock lock(mutex_);
    const auto found = mappings_.find(start);
    if (found == mappings_.end()) {
      return {ErrorCode::kInvalidArgument,
              "cuda: no shared memory is mapped at this address. It may have been unmapped"};
    }
    mapping = found->second;
    mappings_.erase(found);
  }
  const auto context = contexts_.inUse(mapping.device);
  if (!context.ok()) return context.error();
  const CudaScope scope(contexts_, mapping.device, *context);
  MOONCAKE_TRY(scope.status());
  return takeOut(start, mapping);
}

Result<std::span<std::byte>> CudaPeerMemory::mapForHost(std::span<std::byte> memory) {
  MOONCAKE_TRY(contexts_.checkProcess());
  return gdr_.map(memory);
}

Result<bool> CudaPeerMemory::canAccessPeer(int device, int peer) {
  const auto from = contexts_.handleOf(device), to = contexts_.handleOf(peer);
  if (!from.ok()) return from.error();
  if (!to.ok()) return to.error();
  int can = device == peer;
  if (device != peer)
    MOONCAKE_TRY(contexts_.check("cuDeviceCanAccessPeer", device,
                                 driver().cuDeviceCanAccessPeer(&can, *from, *to)));
  return can != 0;
}

}  // namespace mooncake
