#include <cstdio>
#include <thread>

#include "check.h"
#include "clock.h"
#include "device.h"
#include "driver.h"
#include "parts.h"

namespace probe {
namespace {

constexpr double kReplayMs = 1000;
constexpr double kQuietMs = 50;  // a replay that may not go on is watched for so long

const char* yes(bool is) { return is ? "yes" : "no"; }

// The words of one graph. A replay waits for the event, writes `rung`, waits for `open`, writes
// `over`, and records the event.
struct Words {
  uint32_t* const rung = pinnedWords(3);
  uint32_t* const open = rung + 1;
  uint32_t* const over = rung + 2;
  void clear() {
    for (uint32_t* word : {rung, open, over}) store(word, 0);
  }
};

// Returns the graph, or null if the driver refuses a part of it.
CUgraph capture(CUstream stream, CUevent event, const Words& words) {
  CHECKED(driver.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  const CUresult waits = driver.cuStreamWaitEvent(stream, event, CU_EVENT_WAIT_EXTERNAL);
  const CUresult rings = driver.cuStreamWriteValue32(stream, addressOf(words.rung), 1, 0);
  const CUresult stops =
      driver.cuStreamWaitValue32(stream, addressOf(words.open), 1, CU_STREAM_WAIT_VALUE_GEQ);
  const CUresult ends = driver.cuStreamWriteValue32(stream, addressOf(words.over), 1, 0);
  const CUresult records = driver.cuEventRecordWithFlags(event, stream, CU_EVENT_RECORD_EXTERNAL);
  CUgraph graph = nullptr;
  const CUresult ended = driver.cuStreamEndCapture(stream, &graph);
  size_t nodes = 0;
  if (graph != nullptr) CHECKED(driver.cuGraphGetNodes(graph, nullptr, &nodes));
  std::printf(
      "[graphs] capture: wait external %s, write word %s, wait for word %s, write word %s, "
      "record external %s, end %s, %zu nodes (5 expected)\n",
      nameOf(waits), nameOf(rings), nameOf(stops), nameOf(ends), nameOf(records), nameOf(ended),
      nodes);
  return graph;
}

void replay(CUgraphExec exec, CUstream stream, CUevent event, Words& words) {
  for (int i = 0; i < 3; ++i) {
    words.clear();
    const auto begin = Clock::now();
    CHECKED(driver.cuGraphLaunch(exec, stream));
    const bool hasRung = reaches(words.rung, 1, kReplayMs);
    const bool isEarly = reaches(words.over, 1, kQuietMs);
    const bool isPending = driver.cuEventQuery(event) == CUDA_ERROR_NOT_READY;
    const double waited = millisecondsSince(begin);
    store(words.open, 1);
    const bool isOver = reaches(words.over, 1, kReplayMs);
    std::printf(
        "[graphs] replay %d: rings %s, passes its wait early %s, event pending %s, ends %s "
        "%.2f ms after the release (yes, no, yes, yes expected)\n",
        i, yes(hasRung), yes(isEarly), yes(isPending), yes(isOver),
        millisecondsSince(begin) - waited);
  }
  CHECKED(driver.cuCtxSynchronize());
}

// A replay must wait for a record of the event that another stream has not come to yet.
void replayBehindRecord(CUgraphExec exec, CUstream stream, CUevent event, Words& words) {
  words.clear();
  uint32_t* const gate = pinnedWords(1);
  CUstream other = makeStream();
  awaitWord(other, gate, 1);
  CHECKED(driver.cuEventRecord(event, other));
  store(words.open, 1);
  CHECKED(driver.cuGraphLaunch(exec, stream));
  const bool isEarly = reaches(words.rung, 1, kQuietMs);
  store(gate, 1);
  const bool isOver = reaches(words.over, 1, kReplayMs);
  std::printf(
      "[graphs] replay behind a pending record: begins early %s, ends after it %s "
      "(no, yes expected)\n",
      yes(isEarly), yes(isOver));
  CHECKED(driver.cuCtxSynchronize());
}

// A second replay of one graph must wait until the first one has recorded the event.
void replayTwice(CUgraphExec exec, CUstream stream, Words& words) {
  words.clear();
  CUstream other = makeStream();
  CHECKED(driver.cuGraphLaunch(exec, stream));
  const bool first = reaches(words.rung, 1, kReplayMs);
  store(words.rung, 0);
  CHECKED(driver.cuGraphLaunch(exec, other));
  const bool isEarly = reaches(words.rung, 1, kQuietMs);
  store(words.open, 1);
  const bool second = reaches(words.rung, 1, kReplayMs);
  std::printf(
      "[graphs] two replays on two streams: the second begins early %s, both run %s "
      "(no, yes expected)\n",
      yes(isEarly), yes(first && second));
  CHECKED(driver.cuCtxSynchronize());
}

// During a capture in the strictest mode, another thread asks for an event outside of it.
void askDuringCapture(CUstream stream, CUstream other, bool isRelaxed) {
  CUevent outside = makeEvent();
  CHECKED(driver.cuEventRecord(outside, other));
  CHECKED(driver.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CUresult event = CUDA_SUCCESS, queue = CUDA_SUCCESS, memory = CUDA_SUCCESS;
  void* pinned = nullptr;
  std::thread([&] {
    useContext();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (isRelaxed) CHECKED(driver.cuThreadExchangeStreamCaptureMode(&mode));
    event = driver.cuEventQuery(outside);
    queue = driver.cuStreamQuery(other);
    memory = driver.cuMemHostAlloc(&pinned, 4096, CU_MEMHOSTALLOC_PORTABLE);
  }).join();
  CUgraph graph = nullptr;
  const CUresult ended = driver.cuStreamEndCapture(stream, &graph);
  std::printf(
      "[graphs] another thread, %s, during a global capture: cuEventQuery %s, cuStreamQuery "
      "%s, cuMemHostAlloc %s; the capture ends with %s\n",
      isRelaxed ? "in relaxed mode" : "as it is", nameOf(event), nameOf(queue), nameOf(memory),
      nameOf(ended));
}

}  // namespace

void graphs() {
  openDevice();
  CUstream stream = makeStream(), other = makeStream();
  CUevent event = makeEvent();
  CHECKED(driver.cuEventRecord(event, other));
  // First, because a replay that hangs ends this process.
  askDuringCapture(stream, other, true);
  askDuringCapture(stream, other, false);
  Words words;
  CUgraph graph = capture(stream, event, words);
  CUgraphExec exec = nullptr;
  const CUresult made =
      graph == nullptr ? CUDA_ERROR_INVALID_VALUE : driver.cuGraphInstantiate(&exec, graph, 0);
  std::printf("[graphs] instantiate %s\n", nameOf(made));
  if (made != CUDA_SUCCESS) return;
  replay(exec, stream, event, words);
  replayBehindRecord(exec, stream, event, words);
  replayTwice(exec, stream, words);
}

}  // namespace probe
