#include "transfer/c_api/transfer_engine_c.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "transfer/protocol.h"
#include "transfer/topology.h"
#include "transfer/transfer_engine.h"

namespace {

using namespace mooncake;            // this file only translates between C and C++
using namespace mooncake::transfer;  // the names below are the C API's

// Object behind a transfer_engine_t. The engine is made once its protocol is known.
struct Handle {
  TransferEngineOptions options;
  Mutex mutex;
  std::shared_ptr<TransferEngine> engine GUARDED_BY(mutex);
  bool isUninstalled GUARDED_BY(mutex) = false;  // since the last installTransport()
};

constexpr const char* kWho = "transfer engine";

Code fail(Code code, const std::string& what) {
  log(LogLevel::kWarning, kWho, what, " (", int(code), ")");
  return code;
}

std::string textOf(const char* text) { return text ? text : ""; }

// Null if there is no handle, or if no protocol is installed yet.
std::shared_ptr<TransferEngine> engineOf(transfer_engine_t handle) {
  if (!handle) return nullptr;
  auto* own = static_cast<Handle*>(handle);
  Lock lock(own->mutex);
  if (!own->engine) (void)fail(kInvalid, "a call before installTransport()");
  return own->engine;
}

// Whether uninstallTransport() has already released all memory and segments.
bool hasLetGo(transfer_engine_t handle) {
  if (!handle) return false;
  auto* own = static_cast<Handle*>(handle);
  Lock lock(own->mutex);
  return own->isUninstalled;
}

// Makes the engine at the first call. Returns whether it exists with this protocol.
bool install(Handle& handle, const std::string& protocol, const std::string& devices = "") {
  Lock lock(handle.mutex);
  if (handle.engine) {
    if (handle.engine->protocol() == protocol) return true;
    (void)fail(kInvalid, "protocol \"" + protocol + "\" cannot be installed beside \"" +
                             handle.engine->protocol() + "\": an engine has only one protocol");
    return false;
  }
  TransferEngineOptions options = handle.options;
  options.protocol = protocol;
  options.devices = devices;
  auto engine = TransferEngine::open(std::move(options));
  if (!engine.ok()) {
    (void)fail(kInvalid, engine.error().message);
    return false;
  }
  handle.engine = std::move(*engine);
  handle.isUninstalled = false;
  return true;
}

int submit(transfer_engine_t handle, batch_id_t id, const transfer_request* entries, size_t count,
           std::optional<Notification> notification) {
  const auto engine = engineOf(handle);
  if (!engine) return kInvalid;
  const auto batch = engine->batch(id);
  if (!batch || (!entries && count != 0)) return fail(kInvalid, "no such batch, or no entries");
  std::vector<TransferRequest> requests(count);
  for (size_t i = 0; i < count; ++i) {
    const transfer_request& entry = entries[i];
    if (entry.opcode != OPCODE_READ && entry.opcode != OPCODE_WRITE)
      return fail(kInvalid,
                  "opcode " + std::to_string(entry.opcode) + " is neither read nor write");
    auto segment = engine->segment(entry.target_id);
    if (!segment)
      return fail(kInvalid, "segment " + std::to_string(entry.target_id) + " is not open");
    requests[i] = {.opcode = entry.opcode == OPCODE_READ ? Opcode::kRead : Opcode::kWrite,
                   .local = reinterpret_cast<uint64_t>(entry.source),
                   .segment = std::move(segment),
                   .remote = entry.target_offset,
                   .bytes = entry.length};
  }
  return engine->submit(batch, requests, std::move(notification));
}

int copyOut(const std::string& text, char* out, size_t bytes) {
  if (!out || bytes <= text.size())
    return fail(kInvalid, "there is no room for " + std::to_string(text.size() + 1) + " bytes");
  std::memcpy(out, text.c_str(), text.size() + 1);
  return kGood;
}

char* copyOf(const std::string& text) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

// Engines that say goodbye to their peers when the program exits.
Mutex gracefulMutex;
std::vector<std::weak_ptr<TransferEngine>>& graceful() REQUIRES(gracefulMutex) {
  static std::vector<std::weak_ptr<TransferEngine>> all;
  return all;
}
void closeGraceful() {
  Lock lock(gracefulMutex);
  for (const auto& one : graceful()) {
    if (const auto engine = one.lock()) engine->close();
  }
}

}  // namespace

extern "C" {

transfer_engine_t createTransferEngine(const char* metadata_conn_string,
                                       const char* local_server_name, const char* ip_or_host_name,
                                       uint64_t rpc_port, int auto_discover) {
  auto env = EngineEnv::read();
  if (!env.ok() || !metadata_conn_string || !local_server_name || rpc_port > UINT16_MAX) {
    (void)fail(kInvalid, env.ok() ? "an engine needs a metadata server, a name, and a port"
                                  : env.error().message);
    return nullptr;
  }
  auto handle = std::make_unique<Handle>();
  handle->options = {.env = std::move(*env),
                     .localName = local_server_name,
                     .host = textOf(ip_or_host_name),
                     .metadataServer = metadata_conn_string,
                     .rpcPort = static_cast<uint16_t>(rpc_port)};
  if (auto_discover && !install(*handle, "tcp")) return nullptr;
  return handle.release();
}

void destroyTransferEngine(transfer_engine_t engine) { delete static_cast<Handle*>(engine); }

int discoverTopology(transfer_engine_t engine) { return engine ? kGood : kInvalid; }

int getLocalIpAndPort(transfer_engine_t engine, char* buf_out, size_t buf_len) {
  const auto own = engineOf(engine);
  return own ? copyOut(own->session(), buf_out, buf_len) : kInvalid;
}

transport_t installTransport(transfer_engine_t engine, const char* proto, void** args) {
  if (!engine || !proto) return nullptr;
  auto* handle = static_cast<Handle*>(engine);
  const bool hasDevices = args && args[0] && usesCards(proto);
  const auto devices = devicesOfMatrix(hasDevices ? static_cast<const char*>(args[0]) : "");
  if (!devices.ok()) {
    (void)fail(kInvalid, devices.error().message);
    return nullptr;
  }
  return install(*handle, proto, *devices) ? handle : nullptr;
}

int uninstallTransport(transfer_engine_t engine, const char* proto) {
  const auto own = engineOf(engine);
  if (!own) return kInvalid;
  if (textOf(proto) != own->protocol())
    return fail(kInvalid, "protocol \"" + textOf(proto) + "\" is not installed");
  own->close();
  auto* handle = static_cast<Handle*>(engine);
  Lock lock(handle->mutex);
  handle->engine.reset();
  handle->isUninstalled = true;
  return kGood;
}

segment_id_t openSegment(transfer_engine_t engine, const char* segment_name) {
  const auto own = engineOf(engine);
  if (!own) return kInvalid;
  Code code = kGood;
  const auto segment = own->openSegment(textOf(segment_name), &code);
  return segment ? segment->id() : segment_id_t(code);
}

segment_id_t openSegmentNoCache(transfer_engine_t engine, const char* segment_name) {
  const auto own = engineOf(engine);
  if (!own) return kInvalid;
  Code code = kGood;
  const auto segment = own->openSegment(textOf(segment_name), &code);
  if (!segment) return code;
  code = own->refresh(*segment);
  return code == kGood ? segment->id() : segment_id_t(code);
}

int closeSegment(transfer_engine_t engine, segment_id_t segment_id) {
  if (hasLetGo(engine)) return kGood;
  const auto own = engineOf(engine);
  return own ? own->closeSegment(segment_id) : kInvalid;
}

int warmupEfaSegment(transfer_engine_t engine, const char* segment_name) {
  const auto own = engineOf(engine);
  return own ? own->warmUp(textOf(segment_name)) : kInvalid;
}

int removeLocalSegment(transfer_engine_t engine, const char* segment_name) {
  const auto own = engineOf(engine);
  if (!own) return kInvalid;
  if (textOf(segment_name) != own->name())
    return fail(kInvalid, "\"" + textOf(segment_name) + "\" is not our own segment");
  return own->retract();
}

int syncSegmentCache(transfer_engine_t engine) {
  const auto own = engineOf(engine);
  return own ? own->refreshSegments() : kInvalid;
}

int registerLocalMemory(transfer_engine_t engine, void* addr, size_t length, const char* location,
                        int remote_accessible) {
  const auto own = engineOf(engine);
  if (!own) return kInvalid;
  return own->registerMemory(reinterpret_cast<uint64_t>(addr), length, location ? location : "*",
                             remote_accessible != 0);
}

int unregisterLocalMemory(transfer_engine_t engine, void* addr) {
  if (hasLetGo(engine)) return kGood;
  const auto own = engineOf(engine);
  return own ? own->unregisterMemory(reinterpret_cast<uint64_t>(addr)) : kInvalid;
}

int registerLocalMemoryBatch(transfer_engine_t engine, buffer_entry_t* buffer_list,
                             size_t buffer_len, const char* location) {
  const auto own = engineOf(engine);
  if (!own || (!buffer_list && buffer_len != 0)) return kInvalid;
  std::vector<TransferEngine::Range> ranges;
  for (size_t i = 0; i < buffer_len; ++i)
    ranges.push_back({reinterpret_cast<uint64_t>(buffer_list[i].addr), buffer_list[i].length});
  return own->registerMemory(ranges, location ? location : "*");
}

int unregisterLocalMemoryBatch(transfer_engine_t engine, void** addr_list, size_t addr_len) {
  if (hasLetGo(engine)) return kGood;
  const auto own = engineOf(engine);
  if (!own || (!addr_list && addr_len != 0)) return kInvalid;
  std::vector<uint64_t> addresses;
  for (size_t i = 0; i < addr_len; ++i)
    addresses.push_back(reinterpret_cast<uint64_t>(addr_list[i]));
  return own->unregisterMemory(addresses);
}

batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size) {
  const auto own = engineOf(engine);
  const auto batch = own ? own->allocateBatch(batch_size) : nullptr;
  return batch ? batch->id : INVALID_BATCH;
}

int submitTransfer(transfer_engine_t engine, batch_id_t batch_id, struct transfer_request* entries,
                   size_t count) {
  return submit(engine, batch_id, entries, count, std::nullopt);
}

int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch_id,
                             struct transfer_request* entries, size_t count,
                             notify_msg_t notify_msg) {
  return submit(engine, batch_id, entries, count,
                Notification{textOf(notify_msg.name), textOf(notify_msg.msg)});
}

int getTransferStatus(transfer_engine_t engine, batch_id_t batch_id, size_t task_id,
                      struct transfer_status* status) {
  const auto own = engineOf(engine);
  const auto batch = own ? own->batch(batch_id) : nullptr;
  if (!batch || !status || task_id >= batch->submitted.load(std::memory_order_acquire))
    return fail(kInvalid, "there is no such transfer");
  const Task& task = batch->tasks[task_id];
  const TaskState state = task.state.load(std::memory_order_acquire);
  status->status = static_cast<int>(state);
  status->transferred_bytes = state == TaskState::kCompleted ? task.request.bytes : 0;
  return kGood;
}

int freeBatchID(transfer_engine_t engine, batch_id_t batch_id) {
  const auto own = engineOf(engine);
  return own ? own->release(batch_id) : kInvalid;
}

notify_msg_t* getNotifsFromEngine(transfer_engine_t engine, int* size) {
  const auto own = engineOf(engine);
  if (!own || !size) return nullptr;
  const auto all = own->takeNotifications();
  *size = static_cast<int>(all.size());
  if (all.empty()) return nullptr;
  auto* messages = static_cast<notify_msg_t*>(std::calloc(all.size(), sizeof(notify_msg_t)));
  for (size_t i = 0; messages && i < all.size(); ++i)
    messages[i] = {copyOf(all[i].name), copyOf(all[i].message)};
  return messages;
}

int freeNotifsMsgBuf(notify_msg_t* msg, int size) {
  for (int i = 0; msg && i < size; ++i) {
    std::free(msg[i].name);
    std::free(msg[i].msg);
  }
  std::free(msg);
  return kGood;
}

int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg) {
  const auto own = engineOf(engine);
  const auto segment =
      own && target_id <= INT32_MAX ? own->segment(static_cast<int32_t>(target_id)) : nullptr;
  if (!segment) return fail(kInvalid, "segment " + std::to_string(target_id) + " is not open");
  return own->notify(segment->name(), {textOf(notify_msg.name), textOf(notify_msg.msg)});
}

int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t*, size_t* count) {
  if (!engineOf(engine) || !count) return kInvalid;
  *count = 0;  // loads are not counted by NIC
  return kGood;
}

int getEngineCounters(transfer_engine_t engine, engine_counters_t* counters) {
  const auto own = engineOf(engine);
  if (!own || !counters) return kInvalid;
  const EngineCounters now = own->counters();
  *counters = {now.opened,       now.reused,       now.active,          now.pending,
               now.retries,      now.connections,  now.collected,       now.bytesRead,
               now.bytesWritten, now.byCards.read, now.byCards.written, now.byCards.retried};
  return kGood;
}

void enableGracefulShutdown(transfer_engine_t engine) {
  const auto own = engineOf(engine);
  if (!own) return;
  static std::once_flag once;
  std::call_once(once, [] {
    Lock lock(gracefulMutex);
    (void)graceful();
    std::atexit(&closeGraceful);
  });
  Lock lock(gracefulMutex);
  graceful().push_back(own);
}

int showLinks(transfer_engine_t engine, char* buf_out, size_t buf_len, int json) {
  const auto own = engineOf(engine);
  return own ? copyOut(own->describeLinks(json != 0), buf_out, buf_len) : kInvalid;
}

}  // extern "C"
