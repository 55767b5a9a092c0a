#include "fabric/bare.h"

#include <array>
#include <rdma/fi_cm.h>
#include <rdma/fi_rma.h>
#include <thread>

#include "wires/nic/libfabric/cards.h"
#include "wires/nic/libfabric/library.h"

namespace mooncake::bench {
namespace {

constexpr size_t kMostDepth = 256;
// If nothing completes for so long, the provider is stuck.
constexpr std::chrono::seconds kPatience{20};

void check(const char* call, ssize_t result) {
  if (result < 0) die(std::string(call) + ": " + std::to_string(-result));
}

}  // namespace

Bare::Bare(Crew& crew, const FabricEnv& env, Station& station, bool spins)
    : crew_(crew),
      spins_(spins),
      memory_(station.memory()),
      inbox_(station.inbox()),
      contexts_(kMostDepth),
      receiveContexts_(kReceives) {
  const auto cards = orDie(listLibfabricCards(env));
  auto* info = static_cast<fi_info*>(cards.front().info.get());
  const auto library = orDie(LibfabricLibrary::open(env.libfabricPath));
  check("fi_fabric", library->fabric(info->fabric_attr, &fabric_, nullptr));
  check("fi_domain", ::fi_domain(fabric_, info, &domain_, nullptr));
  fi_av_attr table{.type = info->domain_attr->av_type};
  check("fi_av_open", ::fi_av_open(domain_, &table, &addresses_, nullptr));
  fi_cq_attr queue{.size = 4096,
                   .format = FI_CQ_FORMAT_CONTEXT,
                   .wait_obj = spins_ ? FI_WAIT_NONE : FI_WAIT_UNSPEC};
  if (!spins_ && ::fi_cq_open(domain_, &queue, &completions_, nullptr) != 0) {
    spins_ = true;
    queue.wait_obj = FI_WAIT_NONE;
  }
  if (spins_) check("fi_cq_open", ::fi_cq_open(domain_, &queue, &completions_, nullptr));
  check("fi_endpoint", ::fi_endpoint(domain_, info, &endpoint_, nullptr));
  check("fi_ep_bind", ::fi_ep_bind(endpoint_, &addresses_->fid, 0));
  check("fi_ep_bind", ::fi_ep_bind(endpoint_, &completions_->fid, FI_TRANSMIT | FI_RECV));
  check("fi_enable", ::fi_enable(endpoint_));
  const uint64_t all = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  check("fi_mr_reg",
        ::fi_mr_reg(domain_, memory_.data(), memory_.size(), all, 0, 7, 0, &region_, nullptr));
  Bytes address(256);
  size_t length = address.size();
  check("fi_getname", ::fi_getname(&endpoint_->fid, address.data(), &length));
  const bool isByAddress = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  const uint64_t base = isByAddress ? reinterpret_cast<uint64_t>(memory_.data()) : 0;
  const auto told = crew_.exchange(ByteWriter()
                                       .putBytes(ByteView(address).first(length))
                                       .put(base)
                                       .put(::fi_mr_key(region_))
                                       .take());
  ByteReader in(told[crew_.rank() == 0 ? 1 : 0]);
  const ByteView theirs = in.getBytes(256);
  remoteAddress_ = in.get<uint64_t>();
  remoteKey_ = in.get<uint64_t>();
  if (::fi_av_insert(addresses_, theirs.data(), 1, &peer_, 0, nullptr) != 1) die("fi_av_insert");
}

Bare::~Bare() {
  for (fid* one : {&endpoint_->fid, &region_->fid, &completions_->fid, &addresses_->fid,
                   &domain_->fid, &fabric_->fid})
    ::fi_close(one);
}

void Bare::poll(std::vector<size_t>* ended) {
  std::array<fi_cq_entry, 64> entries;
  ssize_t got = ::fi_cq_read(completions_, entries.data(), entries.size());
  if (got == -FI_EAGAIN && !spins_)
    got = ::fi_cq_sread(completions_, entries.data(), entries.size(), nullptr, 1);
  if (got == -FI_EAGAIN) return;
  check("fi_cq_read", got);
  for (const fi_cq_entry& entry : std::span(entries).first(static_cast<size_t>(got))) {
    const auto* context = static_cast<fi_context2*>(entry.op_context);
    if (context >= contexts_.data() && context < contexts_.data() + contexts_.size()) {
      ended->push_back(static_cast<size_t>(context - contexts_.data()));
    } else {
      postReceive(static_cast<size_t>(context - receiveContexts_.data()));
    }
  }
}

void Bare::postReceive(size_t i) {
  check("fi_recv", ::fi_recv(endpoint_, &inbox_[i * kReceiveBytes], kReceiveBytes, nullptr,
                             FI_ADDR_UNSPEC, &receiveContexts_[i]));
}

// Completes like our own writes: once the data is in the peer's memory.
ssize_t Bare::write(std::byte* from, size_t bytes, uint64_t offset, void* context) {
  const iovec piece{from, bytes};
  void* descriptor = ::fi_mr_desc(region_);
  const fi_rma_iov remote{remoteAddress_ + offset, bytes, remoteKey_};
  const fi_msg_rma message{.msg_iov = &piece,
                           .desc = &descriptor,
                           .iov_count = 1,
                           .addr = peer_,
                           .rma_iov = &remote,
                           .rma_iov_count = 1,
                           .context = context};
  return ::fi_writemsg(endpoint_, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

double Bare::stream(Verb verb, size_t bytes, size_t depth, double seconds) {
  std::vector<size_t> ended;
  for (size_t i = 0; i < depth; ++i) ended.push_back(i);
  void* descriptor = ::fi_mr_desc(region_);
  uint64_t moved = 0, number = 0;
  const auto start = Clock::now();
  auto stuck = Deadline::after(kPatience);
  for (;;) {
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    if (elapsed >= seconds && ended.size() == depth) return static_cast<double>(moved) / elapsed;
    while (elapsed < seconds && !ended.empty()) {
      const uint64_t offset = number % (memory_.size() / bytes) * bytes;
      void* context = &contexts_[ended.back()];
      std::byte* at = memory_.data() + offset;
      ssize_t result = 0;
      switch (verb) {
        case Verb::kSend:
          result = ::fi_send(endpoint_, at, bytes, descriptor, peer_, context);
          break;
        case Verb::kWrite:
          result = write(at, bytes, offset, context);
          break;
        case Verb::kRead:
          result = ::fi_read(endpoint_, at, bytes, descriptor, peer_, remoteAddress_ + offset,
                             remoteKey_, context);
          break;
      }
      if (result == -FI_EAGAIN) break;
      check("post", result);
      ended.pop_back();
      ++number;
      moved += bytes;
    }
    const size_t before = ended.size();
    poll(&ended);
    if (ended.size() != before) stuck = Deadline::after(kPatience);
    if (stuck.passed())
      die("nothing has completed for 20 s. If this provider cannot sleep: --spin");
  }
}

void Bare::attend() {
  for (size_t i = 0; i < kReceives && !isReceiving_; ++i) postReceive(i);
  isReceiving_ = true;
  std::atomic<bool> isOver{false};
  std::thread waiter([&] {
    crew_.barrier();
    isOver = true;
  });
  std::vector<size_t> none;
  while (!isOver) poll(&none);
  waiter.join();
}

}  // namespace mooncake::bench
