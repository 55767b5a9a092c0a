// Measures how fast an engine moves data to and from another process, for comparison with
// tcp_ceiling.
//
//   engine_bench serve WIRE ADDRESS THREADS BUFFER PLACE    (until its input ends)
//       prints one line, the last arguments of `run`. PLACE: user, or arena, which peers on the
//       host map, or fake, memory of a fake device
//   engine_bench run WIRE ADDRESS THREADS READ|WRITE BUFFER BLOCK TOTAL DEPTH PLACE \
//                    ENDPOINT ADDRESS KEY
//       DEPTH blocks are under way at a time. PLACE: user or fake. Prints bytes per second
//   engine_bench memcpy BUFFER BLOCK TOTAL
//   engine_bench targets COUNT                              (until its input ends)
//       makes COUNT transfer engines; prints a line for each: its name, and its memory's address
//   engine_bench idle SECONDS                               (those lines on its input)
//       Prints microseconds of a bare TCP connect and of a first transfer, each to a new peer (the
//       medians), percent of a core that the engine takes afterwards, and resident MiB
//   engine_bench posts BLOCK COUNT
//       writes BLOCK bytes to a network card that completes at once, through the rails that all
//       channels of transport fabric share. Prints posts with their completions per second
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/deadline.h"
#include "device/accelerators.h"
#include "device/fake/fake_devices.h"
#include "device/memory_owner.h"
#include "engine/engine.h"
#include "transfer/session_socket.h"
#include "transfer/transfer_engine.h"
#include "wires/cards/rails.h"
#include "wires/nic/null/null_nic.h"

namespace mooncake {
namespace {

template <typename T>
T orDie(Result<T> result) {
  if (result.ok()) return std::move(*result);
  std::fprintf(stderr, "%s\n", result.error().message.c_str());
  std::exit(1);
}
void orDie(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.error().message.c_str());
  std::exit(1);
}

std::string hexOf(ByteView bytes) {
  std::string text;
  char digits[3];
  for (const std::byte byte : bytes) {
    std::snprintf(digits, sizeof(digits), "%02x", unsigned(byte));
    text += digits;
  }
  return text;
}

Bytes fromHex(const std::string& text) {
  Bytes bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(std::byte(std::stoul(text.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::span<std::byte> memory(size_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) std::exit(1);
  std::memset(at, 1, bytes);
  return {static_cast<std::byte*>(at), bytes};
}

struct Memory {
  std::span<std::byte> bytes;
  MemoryOwner owner;
};

// `place`: user, or fake, the first fake device of a build that has them.
Memory memoryIn(std::string_view place, size_t bytes) {
  if (place != "fake") return {memory(bytes), {}};
  auto* const fake = static_cast<FakeDevices*>(orDie(openAccelerator("fake")));
  const auto allocated = orDie(fake->allocate(0, bytes));
  std::memset(allocated.data(), 1, bytes);
  return {allocated, {.accelerator = fake, .device = 0}};
}

std::shared_ptr<Engine> engineOf(const std::string& wire, const std::string& host, size_t threads) {
  EngineOptions options{.env = orDie(EngineEnv::read()),
                        .jobKey = Bytes(32, std::byte{1}),
                        .logName = "bench",
                        .dataThreads = threads,
                        .peersReturn = true};
  options.env.transports = {wire};
  options.env.hostIp = host;
  return orDie(Engine::create(std::move(options)));
}

int serve(char** arguments) {
  const auto engine = engineOf(arguments[0], arguments[1], std::stoul(arguments[2]));
  const size_t bytes = std::stoull(arguments[3]);
  ArenaBlock block;
  Memory place;
  if (std::string_view(arguments[4]) == "arena") {
    block = orDie(engine->arena().allocate(bytes));
    std::memset(block.data(), 1, bytes);
    place = {{block.data(), bytes}, {}};
  } else {
    place = memoryIn(arguments[4], bytes);
  }
  const auto region = orDie(
      engine->regions().add(place.bytes.data(), bytes, kRemoteRead | kRemoteWrite, place.owner));
  std::cout << hexOf(engine->endpoint()) << ' ' << region.remote().address << ' '
            << region.remote().key << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
  }
  return 0;
}

struct Batch {
  explicit Batch(Doorbell* bell) : completion(bell) {}
  Completion completion;
  std::vector<GetRequest> gets;
  std::vector<WriteRequest> writes;
};

class Mover {
 public:
  Mover(Channel& channel, RemoteRegion region, const Memory& buffer, bool reads, Doorbell& bell)
      : channel_(channel), region_(region), buffer_(buffer), reads_(reads), bell_(bell) {}

  void move(size_t block, size_t total, size_t depth) {
    constexpr size_t kBatches = 4;
    const size_t each = std::max<size_t>(depth / kBatches, 1);
    std::vector<std::unique_ptr<Batch>> batches;
    for (size_t i = 0; i < std::min(kBatches, depth); ++i)
      batches.push_back(std::make_unique<Batch>(&bell_));
    size_t done = 0;
    for (size_t turn = 0; done < total; ++turn) {
      Batch& batch = *batches[turn % batches.size()];
      await(batch);
      batch.gets.clear();
      batch.writes.clear();
      for (size_t i = 0; i < each && done < total; ++i, done += block) {
        const size_t at = done % buffer_.bytes.size();
        const auto piece = buffer_.bytes.subspan(at, block);
        if (reads_) {
          batch.gets.push_back({region_, at, piece, &batch.completion, false, buffer_.owner});
        } else {
          batch.writes.push_back({region_, at, piece, &batch.completion, false, buffer_.owner});
        }
      }
      orDie(reads_ ? channel_.get(std::span<const GetRequest>(batch.gets))
                   : channel_.write(std::span<const WriteRequest>(batch.writes)));
    }
    for (auto& batch : batches) await(*batch);
  }

 private:
  void await(const Batch& batch) {
    const Waiter waiter{bell_, never_, 0, Deadline::after(std::chrono::seconds(60)),
                        SpinPolicy{.pauses = 0, .yields = 0}};
    (void)waiter.until([&] { return batch.completion.finished(); });
    const ErrorCode code = batch.completion.error.load();
    if (code != ErrorCode::kOk) orDie(Status(code, errorCodeName(code)));
  }

  Channel& channel_;
  const RemoteRegion region_;
  const Memory buffer_;
  const bool reads_;
  Doorbell& bell_;  // outlives the channel
  const Interrupt never_;
};

double secondsSince(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

int run(char** arguments) {
  Doorbell bell;
  const auto engine = engineOf(arguments[0], arguments[1], std::stoul(arguments[2]));
  const bool reads = std::string_view(arguments[3]) == "READ";
  const size_t bytes = std::stoull(arguments[4]), block = std::stoull(arguments[5]);
  const size_t total = std::stoull(arguments[6]), depth = std::stoull(arguments[7]);
  const RemoteRegion region{std::stoull(arguments[10]), bytes, std::stoull(arguments[11])};
  const Memory buffer = memoryIn(arguments[8], bytes);
  const auto peer = orDie(
      engine->open(fromHex(arguments[9]), "the server", Deadline::after(std::chrono::seconds(10))));
  Mover mover(*peer->channel, region, buffer, reads, bell);
  // Warm-up: each call asks for missing data lanes until all are open. Then the whole buffer once:
  // mapping a page at its first use costs more than copying it.
  for (int i = 0; i < 4; ++i) mover.move(block, std::min(total, std::max(block, bytes / 8)), depth);
  mover.move(block, bytes, depth);
  const auto began = Clock::now();
  mover.move(block, total, depth);
  std::printf("%.0f\n", double(total) / secondsSince(began));
  return 0;
}

int copy(char** arguments) {
  const size_t bytes = std::stoull(arguments[0]), block = std::stoull(arguments[1]);
  const size_t total = std::stoull(arguments[2]);
  const auto from = memory(bytes), to = memory(bytes);
  const auto began = Clock::now();
  for (size_t done = 0; done < total; done += block)
    std::memcpy(to.data() + done % bytes, from.data() + done % bytes, block);
  std::printf("%.0f\n", double(total) / secondsSince(began));
  return 0;
}

std::shared_ptr<transfer::TransferEngine> transferEngine() {
  transfer::TransferEngineOptions options{
      .env = orDie(EngineEnv::read()), .localName = "127.0.0.1", .metadataServer = "P2PHANDSHAKE"};
  return orDie(transfer::TransferEngine::open(std::move(options)));
}

int targets(char** arguments) {
  std::vector<std::shared_ptr<transfer::TransferEngine>> engines;
  for (int left = std::atoi(arguments[0]); left > 0; --left) {
    engines.push_back(transferEngine());
    const auto place = memory(4096);
    const auto address = reinterpret_cast<uint64_t>(place.data());
    if (engines.back()->registerMemory(address, place.size()) != transfer::kGood) return 1;
    std::cout << engines.back()->session() << ' ' << address << std::endl;
  }
  std::cout << "done" << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
  }
  return 0;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double cpuSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

double residentMiB() {
  std::ifstream statm("/proc/self/statm");
  size_t all = 0, resident = 0;
  statm >> all >> resident;
  return double(resident) * double(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

// Reads names and addresses of targets from its input.
int idle(char** arguments) {
  const auto engine = transferEngine();
  const auto buffer = memory(4096);
  const auto here = reinterpret_cast<uint64_t>(buffer.data());
  if (engine->registerMemory(here, buffer.size()) != transfer::kGood) return 1;
  std::vector<double> handshakes, firsts;
  std::string session;
  for (uint64_t address; std::cin >> session >> address;) {
    auto began = Clock::now();
    const auto where = orDie(transfer::SessionId::parse(session));
    const Fd bare = orDie(transfer::connectTo(where, Deadline::after(std::chrono::seconds(10))));
    handshakes.push_back(secondsSince(began));
    began = Clock::now();
    const auto segment = engine->openSegment(session);
    const transfer::TransferRequest request{transfer::Opcode::kWrite, here, segment, address, 4096};
    if (!segment || engine->transfer({&request, 1}) != transfer::kGood) return 1;
    firsts.push_back(secondsSince(began));
  }
  const double before = cpuSeconds();
  const double seconds = std::atof(arguments[0]);
  ::usleep(useconds_t(seconds * 1e6));
  std::printf("%.0f %.0f %.4f %.1f\n", median(handshakes) * 1e6, median(firsts) * 1e6,
              100 * (cpuSeconds() - before) / seconds, residentMiB());
  return 0;
}

class Post final : public RailOperation {
 public:
  Post(std::span<std::byte> source, std::atomic<uint64_t>& done, RailShare& share)
      : source_(source), done_(done), share_(share) {}
  Status begin(Nic& nic) override { return nic.write(1, {source_, nullptr}, {}, 0, this); }
  void end(const NicCompletion&) override { done_.fetch_add(1, std::memory_order_release); }
  RailShare& share() const override { return share_; }

 private:
  const std::span<std::byte> source_;
  std::atomic<uint64_t>& done_;
  RailShare& share_;
};

int posts(char** arguments) {
  constexpr uint64_t kUnderWay = 192;
  const auto source = memory(std::stoull(arguments[0]));
  const uint64_t count = std::stoull(arguments[1]);
  std::vector<std::unique_ptr<Nic>> nics;
  nics.push_back(std::make_unique<NullNic>());
  const auto rails = orDie(Rails::create(std::move(nics), {}));
  std::atomic<uint64_t> done{0};
  RailShare share(*rails);
  const auto began = Clock::now();
  const auto deadline = Deadline::after(std::chrono::minutes(2));
  for (uint64_t i = 0; i < count; ++i) {
    while (i - done.load(std::memory_order_acquire) >= kUnderWay && !deadline.passed())
      std::this_thread::yield();
    rails->submit(0, std::make_unique<Post>(source, done, share));
  }
  while (done.load(std::memory_order_acquire) < count && !deadline.passed())
    std::this_thread::yield();
  std::printf("%.0f\n", double(done) / secondsSince(began));
  rails->stop();
  return done == count ? 0 : 1;
}

}  // namespace
}  // namespace mooncake

int main(int count, char** arguments) {
  const std::string_view what = count > 1 ? arguments[1] : "";
  if (what == "serve" && count == 7) return mooncake::serve(arguments + 2);
  if (what == "run" && count == 14) return mooncake::run(arguments + 2);
  if (what == "memcpy" && count == 5) return mooncake::copy(arguments + 2);
  if (what == "targets" && count == 3) return mooncake::targets(arguments + 2);
  if (what == "idle" && count == 3) return mooncake::idle(arguments + 2);
  if (what == "posts" && count == 4) return mooncake::posts(arguments + 2);
  std::fprintf(stderr, "see the top of engine_bench.cc\n");
  return 2;
}
