/* The transfer engine in C: library libtransfer_engine.so (target transfer_engine in
 * csrc/CMakeLists.txt), which needs neither torch nor Python. Types, names and results are those of
 * Mooncake's transfer_engine_c.h.
 *
 * Calls return 0 on success and a negative code on failure, unless stated otherwise. docs/errors.md
 * lists the codes, and the log says why a call failed. The engine does not use the caller's strings
 * and arrays after the call. Any thread. */
#ifndef TRANSFER_ENGINE_C
#define TRANSFER_ENGINE_C

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TRANSFER_ENGINE_API __attribute__((visibility("default")))
#else
#define TRANSFER_ENGINE_API
#endif

typedef int32_t segment_handle_t;
typedef int32_t segment_id_t;
typedef uint64_t batch_id_t;
typedef void* transfer_engine_t;
typedef void* transport_t;

#define LOCAL_SEGMENT (0)
#define INVALID_BATCH UINT64_MAX

#define OPCODE_READ (0)
#define OPCODE_WRITE (1)

struct transfer_request {
  int opcode;
  void* source; /* local address: target of a read, source of a write */
  segment_id_t target_id;
  uint64_t target_offset; /* address in the target's process */
  uint64_t length;
};
typedef struct transfer_request transfer_request_t;

/* A transfer ends as COMPLETED or FAILED. One that is late or canceled has failed: programs take
 * the other numbers for success. */
#define STATUS_WAITING (0)
#define STATUS_PENDING (1)
#define STATUS_INVALID (2)
#define STATUS_CANCELED (3)
#define STATUS_COMPLETED (4)
#define STATUS_TIMEOUT (5)
#define STATUS_FAILED (6)

struct transfer_status {
  int status;
  uint64_t transferred_bytes;
};
typedef struct transfer_status transfer_status_t;

struct notify_msg {
  char* name;
  char* msg;
};
typedef struct notify_msg notify_msg_t;

struct buffer_entry {
  void* addr;
  size_t length;
};
typedef struct buffer_entry buffer_entry_t;

struct segment_desc {
  int type; /* 0: memory */
  union {
    struct {
      void* addr;
      uint64_t size;
      const char* location;
    } rdma;
    struct {
      const char* file_path;
      const char* subsystem_name;
      const char* proto;
      const char* ip;
      uint64_t port;
    } nvmeof;
  } desc_;
};
typedef struct segment_desc segment_desc_t;

struct nic_load_stat {
  char device_name[64];
  uint64_t inflight_bytes;
  double ewma_bandwidth_bps;
};
typedef struct nic_load_stat nic_load_stat_t;

/* What an engine has done since it began, and its state now. */
struct engine_counters {
  uint64_t opened;      /* channels to peers that were established, by a call or by accepting one */
  uint64_t reused;      /* times that a channel was wanted and was open already */
  uint64_t active;      /* peers that are connected */
  uint64_t pending;     /* calls under way: attempts to connect */
  uint64_t retries;     /* calls after the first one for a channel, and channels made again */
  uint64_t connections; /* open now, of all peers */
  uint64_t collected;   /* idle connections that were closed, and ended peers that were forgotten */
  uint64_t bytes_read;  /* by this engine's transfers that succeeded */
  uint64_t bytes_written;
  uint64_t cards_read; /* bytes of reads that network cards have moved by themselves */
  uint64_t cards_written;
  uint64_t cards_retried; /* bytes that cards could not move and that were sent once more */
};
typedef struct engine_counters engine_counters_t;

/* Returns NULL on failure. `ip_or_host_name` is the address at which peers reach this process.
 * `rpc_port` 0 takes a free port. `auto_discover` 0 lets installTransport() choose the protocol;
 * otherwise the engine is made at once, with tcp. */
TRANSFER_ENGINE_API transfer_engine_t createTransferEngine(const char* metadata_conn_string,
                                                           const char* local_server_name,
                                                           const char* ip_or_host_name,
                                                           uint64_t rpc_port, int auto_discover);
TRANSFER_ENGINE_API void destroyTransferEngine(transfer_engine_t engine);
TRANSFER_ENGINE_API int discoverTopology(transfer_engine_t engine);
/* The session id, host:port, by which peers open this engine. */
TRANSFER_ENGINE_API int getLocalIpAndPort(transfer_engine_t engine, char* buf_out, size_t buf_len);

/* Returns NULL if the protocol is not available. `args` may be NULL. For protocols over network
 * cards args[0] names the cards to use, as text: a NIC priority matrix in JSON, or names separated
 * by commas. */
TRANSFER_ENGINE_API transport_t installTransport(transfer_engine_t engine, const char* proto,
                                                 void** args);
/* Closes all segments and unregisters all memory. Afterwards closeSegment() and the calls that
 * unregister memory return 0. */
TRANSFER_ENGINE_API int uninstallTransport(transfer_engine_t engine, const char* proto);

/* Returns the segment's id, or a negative code. LOCAL_SEGMENT is our own. */
TRANSFER_ENGINE_API segment_id_t openSegment(transfer_engine_t engine, const char* segment_name);
TRANSFER_ENGINE_API segment_id_t openSegmentNoCache(transfer_engine_t engine,
                                                    const char* segment_name);
TRANSFER_ENGINE_API int closeSegment(transfer_engine_t engine, segment_id_t segment_id);
/* Connects to the segment's engine and lets each network card reach it. Returns 0 on wires without
 * cards, too. */
TRANSFER_ENGINE_API int warmupEfaSegment(transfer_engine_t engine, const char* segment_name);
TRANSFER_ENGINE_API int removeLocalSegment(transfer_engine_t engine, const char* segment_name);
TRANSFER_ENGINE_API int syncSegmentCache(transfer_engine_t engine);

TRANSFER_ENGINE_API int registerLocalMemory(transfer_engine_t engine, void* addr, size_t length,
                                            const char* location, int remote_accessible);
TRANSFER_ENGINE_API int unregisterLocalMemory(transfer_engine_t engine, void* addr);
TRANSFER_ENGINE_API int registerLocalMemoryBatch(transfer_engine_t engine,
                                                 buffer_entry_t* buffer_list, size_t buffer_len,
                                                 const char* location);
TRANSFER_ENGINE_API int unregisterLocalMemoryBatch(transfer_engine_t engine, void** addr_list,
                                                   size_t addr_len);

/* Makes a batch with room for `batch_size` transfers. */
TRANSFER_ENGINE_API batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);
TRANSFER_ENGINE_API int submitTransfer(transfer_engine_t engine, batch_id_t batch_id,
                                       struct transfer_request* entries, size_t count);
/* When the whole batch has succeeded, the notification goes to the first entry's target. */
TRANSFER_ENGINE_API int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch_id,
                                                 struct transfer_request* entries, size_t count,
                                                 notify_msg_t notify_msg);
/* `task_id`: index of the transfer in its batch, from 0. */
TRANSFER_ENGINE_API int getTransferStatus(transfer_engine_t engine, batch_id_t batch_id,
                                          size_t task_id, struct transfer_status* status);
TRANSFER_ENGINE_API int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

/* Returns the notifications since the last call; NULL if there are none, or no memory. */
TRANSFER_ENGINE_API notify_msg_t* getNotifsFromEngine(transfer_engine_t engine, int* size);
TRANSFER_ENGINE_API int freeNotifsMsgBuf(notify_msg_t* msg, int size);
TRANSFER_ENGINE_API int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id,
                                          notify_msg_t notify_msg);

/* `count`: in, the capacity of `stats`; out, the number of entries. */
TRANSFER_ENGINE_API int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t* stats,
                                        size_t* count);
TRANSFER_ENGINE_API int getEngineCounters(transfer_engine_t engine, engine_counters_t* counters);
/* The engine will say goodbye to its peers even if the program exits without destroying it. */
TRANSFER_ENGINE_API void enableGracefulShutdown(transfer_engine_t engine);
/* Describes the network cards of this host, and the wire to each open segment: as lines, or as JSON
 * with "local_nics", "topology" and "links". */
TRANSFER_ENGINE_API int showLinks(transfer_engine_t engine, char* buf_out, size_t buf_len,
                                  int json);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFER_ENGINE_C */
