/* The C interface, as a C program sees it: two processes, one of which reads and writes the other's
 * memory. */
#include "transfer_engine_c.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

#ifdef __SANITIZE_THREAD__
/* What the other process writes is brought here by a thread of our engine. That it has come we hear
 * from that process, which the sanitizer does not see. */
__attribute__((visibility("default"))) const char* __tsan_default_suppressions(void);
const char* __tsan_default_suppressions(void) { return "race:process_vm_readv\n"; }
#endif

enum { BYTES = 1 << 20, COUNT = 16, PIECE = BYTES / COUNT };

static transfer_engine_t newEngine(void) {
  transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
  CHECK(engine);
  CHECK(discoverTopology(engine) == 0);
  CHECK(!installTransport(engine, "rdma", NULL));
  CHECK(installTransport(engine, "tcp", NULL));
  CHECK(installTransport(engine, "tcp", NULL));
  CHECK(!installTransport(engine, "shm", NULL));
  return engine;
}

/* Says where it is, serves until it is told to end, and shows what it has got. */
static int target(int from, int to) {
  char session[128], end;
  char* memory = calloc(1, BYTES);
  int count = 0;
  transfer_engine_t engine = newEngine();
  memset(memory, 'a', BYTES);
  CHECK(registerLocalMemory(engine, memory, BYTES, "cpu:0", 1) == 0);
  CHECK(getLocalIpAndPort(engine, session, 3) < 0);
  CHECK(getLocalIpAndPort(engine, session, sizeof session) == 0);
  CHECK(write(to, session, sizeof session) == sizeof session);
  CHECK(write(to, &memory, sizeof memory) == sizeof memory);
  CHECK(read(from, &end, 1) == 1);
  for (int i = 0; i < BYTES; ++i) CHECK(memory[i] == 'b' + i / PIECE % 2);
  /* The word of the batch comes by itself, soon behind its end. */
  int batchWords = 0, directWords = 0;
  for (int looks = 0; looks < 30000 && batchWords + directWords < 2; ++looks) {
    notify_msg_t* notes = getNotifsFromEngine(engine, &count);
    CHECK((notes != NULL) == (count != 0));
    for (int i = 0; i < count; ++i) {
      batchWords += !strcmp(notes[i].name, "batch") && !strcmp(notes[i].msg, "all 16");
      directWords += !strcmp(notes[i].name, "direct") && !strcmp(notes[i].msg, "");
    }
    CHECK(freeNotifsMsgBuf(notes, count) == 0);
    poll(NULL, 0, 1);
  }
  CHECK(batchWords == 1 && directWords == 1);
  CHECK(unregisterLocalMemory(engine, memory) == 0);
  CHECK(unregisterLocalMemory(engine, memory) == -3);
  destroyTransferEngine(engine);
  free(memory);
  return 0;
}

/* How the transfers of the batch have ended: all alike. */
static int stateOf(transfer_engine_t engine, batch_id_t batch, size_t count, uint64_t bytes) {
  transfer_status_t status = {STATUS_WAITING, 0};
  for (size_t i = 0; i < count; ++i) {
    for (int looks = 0; looks < 30000; ++looks) {
      CHECK(getTransferStatus(engine, batch, i, &status) == 0);
      if (status.status != STATUS_WAITING && status.status != STATUS_PENDING) break;
      poll(NULL, 0, 1);
    }
    CHECK(status.transferred_bytes == (status.status == STATUS_COMPLETED ? bytes : 0));
  }
  return status.status;
}

static void initiator(const char* session, char* there) {
  transfer_engine_t engine = newEngine();
  char *memory = calloc(1, BYTES), text[16384];
  transfer_request_t entries[COUNT];
  transfer_status_t status;
  char batchName[] = "batch", directName[] = "direct", message[] = "all 16", nothing[] = "";
  notify_msg_t note = {batchName, message}, direct = {directName, nothing};
  buffer_entry_t halves[2] = {{memory, BYTES / 2}, {memory + BYTES / 2, BYTES / 2}};
  void* starts[2] = {memory, memory + BYTES / 2};
  size_t nics = 4;
  engine_counters_t counters;

  CHECK(registerLocalMemoryBatch(engine, halves, 2, "*") == 0);
  CHECK(unregisterLocalMemoryBatch(engine, starts, 2) == 0);
  CHECK(registerLocalMemory(engine, memory, BYTES, "*", 0) == 0);
  CHECK(registerLocalMemory(engine, memory + 8, 8, "*", 1) == -7);

  segment_id_t segment = openSegment(engine, session);
  CHECK(segment > 0 && openSegment(engine, session) == segment);
  CHECK(openSegmentNoCache(engine, session) == segment);
  CHECK(openSegment(engine, "127.0.0.1:1") == -102);
  CHECK(openSegment(engine, "no.such.host.invalid:15000") == -101);
  CHECK(openSegment(engine, NULL) < 0);
  CHECK(warmupEfaSegment(engine, session) == 0 && syncSegmentCache(engine) == 0);

  for (int i = 0; i < COUNT; ++i) {
    transfer_request_t entry = {OPCODE_READ, memory + i * PIECE, segment,
                                (uint64_t)(uintptr_t)there + (uint64_t)i * PIECE, PIECE};
    entries[i] = entry;
  }
  batch_id_t batch = allocateBatchID(engine, COUNT);
  CHECK(batch != INVALID_BATCH);
  /* In two parts, and no more than there is room for. */
  CHECK(submitTransfer(engine, batch, entries, COUNT / 2) == 0);
  CHECK(submitTransfer(engine, batch, entries + COUNT / 2, COUNT / 2) == 0);
  CHECK(submitTransfer(engine, batch, entries, 1) == -2);
  CHECK(stateOf(engine, batch, COUNT, PIECE) == STATUS_COMPLETED);
  CHECK(getTransferStatus(engine, batch, COUNT, &status) < 0);
  CHECK(freeBatchID(engine, batch) == 0);
  CHECK(freeBatchID(engine, batch) == -1);
  for (int i = 0; i < BYTES; ++i) CHECK(memory[i] == 'a');

  for (int i = 0; i < COUNT; ++i) {
    memset(memory + i * PIECE, 'b' + i % 2, PIECE);
    entries[i].opcode = OPCODE_WRITE;
  }
  batch = allocateBatchID(engine, COUNT);
  CHECK(submitTransferWithNotify(engine, batch, entries, COUNT, note) == 0);
  CHECK(stateOf(engine, batch, COUNT, PIECE) == STATUS_COMPLETED);
  CHECK(freeBatchID(engine, batch) == 0);
  CHECK(genNotifyInEngine(engine, (uint64_t)segment, direct) == 0);
  CHECK(genNotifyInEngine(engine, 4711, direct) < 0);

  /* Outside of what is registered there, and here; what is none. */
  batch = allocateBatchID(engine, 3);
  entries[0].target_offset = 8;
  CHECK(submitTransfer(engine, batch, entries, 1) == 0);
  CHECK(stateOf(engine, batch, 1, PIECE) == STATUS_FAILED);
  entries[0].source = memory + BYTES;
  CHECK(submitTransfer(engine, batch, entries, 1) == -3);
  entries[0].opcode = 7;
  CHECK(submitTransfer(engine, batch, entries, 1) == -1);
  entries[1].target_id = 4711;
  CHECK(submitTransfer(engine, batch, entries + 1, 1) == -1);
  CHECK(freeBatchID(engine, batch) == 0);
  CHECK(submitTransfer(engine, INVALID_BATCH, entries, 1) < 0);
  CHECK(allocateBatchID(engine, 0) == INVALID_BATCH);

  /* Our own memory, by the number that it always has. */
  transfer_request_t own = {OPCODE_WRITE, memory, LOCAL_SEGMENT, (uint64_t)(uintptr_t)memory + 64,
                            8};
  batch = allocateBatchID(engine, 1);
  CHECK(submitTransfer(engine, batch, &own, 1) == 0);
  CHECK(stateOf(engine, batch, 1, 8) == STATUS_FAILED); /* not for others to reach */
  CHECK(freeBatchID(engine, batch) == 0);

  CHECK(getNicLoadStats(engine, NULL, &nics) == 0 && nics == 0);
  CHECK(getEngineCounters(engine, &counters) == 0 && getEngineCounters(engine, NULL) < 0);
  CHECK(counters.opened == 1 && counters.active == 1 && counters.pending == 0);
  CHECK(counters.bytes_read == BYTES && counters.bytes_written == BYTES);
  CHECK(showLinks(engine, text, sizeof text, 0) == 0 && strstr(text, session));
  CHECK(showLinks(engine, text, sizeof text, 1) == 0 && text[0] == '{' && strstr(text, "\"shm\""));
  CHECK(strstr(text, "\"local_nics\": [") && strstr(text, "\"topology\": {"));
  CHECK(showLinks(engine, text, 2, 1) < 0);
  CHECK(closeSegment(engine, segment) == 0 && closeSegment(engine, segment) == -1);
  CHECK(removeLocalSegment(engine, "another") == -1);
  CHECK(uninstallTransport(engine, "rdma") < 0 && uninstallTransport(engine, "tcp") == 0);
  CHECK(openSegment(engine, session) < 0);
  CHECK(closeSegment(engine, segment) == 0);
  CHECK(unregisterLocalMemory(engine, memory) == 0);
  CHECK(unregisterLocalMemoryBatch(engine, starts, 2) == 0);
  CHECK(installTransport(engine, "tcp", NULL) != NULL);
  CHECK(closeSegment(engine, segment) == -1 && unregisterLocalMemory(engine, memory) == -3);
  destroyTransferEngine(engine);
  free(memory);
}

static void serveUntilStopped(int to) {
  char session[128];
  char* memory = calloc(4, BYTES);
  transfer_engine_t engine = newEngine();
  CHECK(registerLocalMemory(engine, memory, 4 * BYTES, "*", 1) == 0);
  CHECK(getLocalIpAndPort(engine, session, sizeof session) == 0);
  CHECK(write(to, session, sizeof session) == sizeof session);
  CHECK(write(to, &memory, sizeof memory) == sizeof memory);
  for (;;) pause();
}

/* A program that polls a batch as NIXL does: only FAILED is a failure, and only WAITING and PENDING
 * are no end. Returns 1 if all transfers have succeeded, 0 if one is under way, -1 on failure. */
static int pollOnce(transfer_engine_t engine, batch_id_t batch, size_t count) {
  int result = 1;
  for (size_t i = 0; i < count; ++i) {
    transfer_status_t now;
    if (getTransferStatus(engine, batch, i, &now) != 0 || now.status == STATUS_FAILED)
      result = -1;
    else if (now.status == STATUS_WAITING || now.status == STATUS_PENDING)
      return 0;
  }
  return result;
}

/* A transfer that is not done in time has failed, for every program. */
static void stoppedTarget(void) {
  int up[2], result = 0;
  char session[128], *there, *memory = calloc(4, BYTES);
  setenv("MOONCAKE_TRANSPORTS", "tcp", 1); /* memory of a stopped process can be mapped and read */
  setenv("MC_TRANSFER_TIMEOUT", "5", 1);
  CHECK(pipe(up) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(100);
    serveUntilStopped(up[1]);
  }
  CHECK(read(up[0], session, sizeof session) == sizeof session);
  CHECK(read(up[0], &there, sizeof there) == sizeof there);
  transfer_engine_t engine = newEngine();
  CHECK(registerLocalMemory(engine, memory, 4 * BYTES, "*", 1) == 0);
  const segment_id_t segment = openSegment(engine, session);
  CHECK(segment > 0);
  transfer_request_t reading = {OPCODE_READ, memory, segment, (uint64_t)(uintptr_t)there,
                                4 * BYTES};
  for (int isStopped = 0; isStopped < 2; ++isStopped) {
    if (isStopped) CHECK(kill(child, SIGSTOP) == 0);
    batch_id_t batch = allocateBatchID(engine, 8);
    CHECK(submitTransfer(engine, batch, &reading, 1) == 0);
    for (int looks = 0; looks < 30000 && (result = pollOnce(engine, batch, 1)) == 0; ++looks)
      poll(NULL, 0, 1);
    CHECK(result == (isStopped ? -1 : 1));
    CHECK(freeBatchID(engine, batch) == 0);
  }
  CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
  destroyTransferEngine(engine);
  free(memory);
}

/* Which network cards are asked for is heard: those of libfabric's provider over TCP, where it is.
 */
static void cards(void) {
  char matrix[] = "{\"cpu:0\": [[\"127.0.0.1\"], [\"127.0.0.2\"]]}", wrong[] = "{\"cpu:0\": [",
       list[] = "127.0.0.1,127.0.0.2", none[] = "eth77";
  char* refused[] = {wrong, none};
  char* taken[] = {matrix, list};
  setenv("MOONCAKE_FABRIC_PROVIDERS", "tcp;ofi_rxm", 1);
  transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
  CHECK(engine);
  for (int i = 0; i < 2; ++i) {
    void* args[] = {refused[i], NULL};
    CHECK(!installTransport(engine, "fabric", args));
  }
  const int hasCards = installTransport(engine, "fabric", NULL) != NULL;
  destroyTransferEngine(engine);
  for (int i = 0; hasCards && i < 2; ++i) {
    void* args[] = {taken[i], NULL};
    engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
    CHECK(engine && installTransport(engine, "fabric", args));
    destroyTransferEngine(engine);
  }
  unsetenv("MOONCAKE_FABRIC_PROVIDERS");
}

int main(void) {
  int down[2], up[2], status;
  char session[128], *there;
  /* The one that is forked has to make its engine by itself. */
  CHECK(pipe(down) == 0 && pipe(up) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(100);
    _exit(target(down[0], up[1]));
  }
  CHECK(!createTransferEngine("etcd://127.0.0.1:2379", "a", "127.0.0.1", 0, 1));
  CHECK(!createTransferEngine("P2PHANDSHAKE", NULL, "127.0.0.1", 0, 1));
  CHECK(!createTransferEngine("P2PHANDSHAKE", "a", "127.0.0.1", 70000, 1));
  CHECK(read(up[0], session, sizeof session) == sizeof session);
  CHECK(read(up[0], &there, sizeof there) == sizeof there);
  cards();
  initiator(session, there);
  CHECK(write(down[1], "x", 1) == 1);
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  stoppedTarget();
  return 0;
}
