#include "engine/rendezvous/generation.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/crypto.h"

namespace mooncake {
namespace {

// The announcement of rank 0, wire form:
//   u32 version  string id (<= 64)  bool hasOwnKey  bytes key (<= 256): empty if it has its own
constexpr uint32_t kVersion = 1;
constexpr const char* kAnnouncement = "mooncake/generation";
constexpr size_t kIdBytes = 8;
constexpr size_t kJobKeyBytes = 32;
constexpr size_t kMostId = 64;
constexpr size_t kMostKey = 256;

// Bounds of the time between two checks whether rank 0 has begun another generation; it grows.
constexpr auto kFirstLook = std::chrono::milliseconds(20);
constexpr auto kLastLook = std::chrono::milliseconds(500);
// The same, once this generation cannot succeed any more.
constexpr auto kFirstPoll = std::chrono::milliseconds(1);
constexpr auto kLastPoll = std::chrono::milliseconds(50);

Bytes bytesOf(const std::string& text) {
  const ByteView view = std::as_bytes(std::span(text.data(), text.size()));
  return {view.begin(), view.end()};
}

}  // namespace

Generation::Generation(Store& store, int rank, std::string id, Bytes announcement, Bytes jobKey)
    : store_(store),
      rank_(rank),
      id_(std::move(id)),
      prefix_("mooncake/" + id_ + "/"),
      announcement_(std::move(announcement)),
      jobKey_(std::move(jobKey)) {}

Result<Bytes> Generation::announcementIn(Store& store, Deadline deadline) {
  auto found = store.get({kAnnouncement}, deadline);
  if (!found.ok()) return found.error();
  return std::move(found->front());
}

Result<std::unique_ptr<Generation>> Generation::join(Store& store, int rank,
                                                     const std::optional<std::string>& ownKey,
                                                     Deadline deadline) {
  if (rank == 0) {
    Bytes announcement = ByteWriter()
                             .put(kVersion)
                             .putString(Crypto::randomHex(kIdBytes))
                             .put(ownKey.has_value())
                             .putBytes(ownKey ? Bytes() : bytesOf(Crypto::randomHex(kJobKeyBytes)))
                             .take();
    MOONCAKE_TRY(store.set(kAnnouncement, announcement));
    return open(store, rank, std::move(announcement), ownKey);
  }
  auto found = announcementIn(store, deadline);
  if (!found.ok() && found.error().code == ErrorCode::kTimeout) {
    return Error{ErrorCode::kTimeout,
                 "rank 0, with which a job begins, did not come to make the group in time (is it "
                 "alive?)"};
  }
  if (!found.ok()) return found.error();
  return open(store, rank, std::move(*found), ownKey);
}

Result<std::unique_ptr<Generation>> Generation::find(Store& store, int rank,
                                                     const std::optional<std::string>& ownKey,
                                                     Deadline deadline) {
  const auto isThere = store.present(kAnnouncement);
  if (!isThere.ok()) return isThere.error();
  if (!*isThere) {
    return Error{ErrorCode::kRefused,
                 "rank " + std::to_string(rank) +
                     " is to join a running job (is_extension, or MOONCAKE_REJOIN), but no job has "
                     "begun over this store: start the job's ranks without it"};
  }
  auto found = announcementIn(store, deadline);
  if (!found.ok()) return found.error();
  return open(store, rank, std::move(*found), ownKey);
}

Result<std::unique_ptr<Generation>> Generation::open(Store& store, int rank, Bytes announcement,
                                                     const std::optional<std::string>& ownKey) {
  ByteReader in(announcement);
  const auto version = in.get<uint32_t>();
  if (!in.failed() && version != kVersion) {
    return Error{ErrorCode::kMismatch,
                 "rank 0 begins jobs in version " + std::to_string(version) +
                     " of the protocol, rank " + std::to_string(rank) + " in version " +
                     std::to_string(kVersion) +
                     ": install the same mooncake-backend everywhere (what the store holds may "
                     "also come from an earlier attempt)"};
  }
  std::string id = in.getString(kMostId);
  const bool hasOwnKey = in.get<bool>();
  const ByteView key = in.getBytes(kMostKey);
  MOONCAKE_TRY(in.finish("announcement of rank 0"));
  if (!ownKey && hasOwnKey) {
    return Error{ErrorCode::kInvalidArgument,
                 "rank 0 was given MOONCAKE_JOB_KEY, rank " + std::to_string(rank) +
                     " was not: set it to the same key on all ranks, or on none"};
  }
  Bytes jobKey = ownKey ? bytesOf(*ownKey) : Bytes(key.begin(), key.end());
  return std::unique_ptr<Generation>(
      new Generation(store, rank, std::move(id), std::move(announcement), std::move(jobKey)));
}

bool Generation::hasSuccessor() {
  if (rank_ == 0) return false;  // rank 0 begins the generations itself
  // A value that exists is returned at once.
  const auto now = store_.get({kAnnouncement}, Deadline::after(kLastLook));
  return now.ok() && now->front() != announcement_;
}

Status Generation::awaitSuccessor(Deadline deadline) {
  for (auto pause = kFirstPoll;; pause = std::min(2 * pause, kLastPoll)) {
    const auto now = store_.get({kAnnouncement}, Deadline::after(kLastLook));
    if (now.ok() && rank_ != 0 && now->front() != announcement_) return {};
    if (!now.ok() && now.error().code != ErrorCode::kTimeout) return now.error();
    if (deadline.passed()) {
      return {ErrorCode::kTimeout,
              "rank 0 did not come to make the group in time: what the store holds comes from an "
              "earlier attempt"};
    }
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline.left()));
  }
}

Status Generation::set(const std::string& key, ByteView value) {
  return store_.set(keyOf(key), value);
}

Status Generation::append(const std::string& key, ByteView value) {
  return store_.append(keyOf(key), value);
}

Result<std::vector<Bytes>> Generation::get(const std::vector<std::string>& keys,
                                           Deadline deadline) {
  std::vector<std::string> ours;
  for (const std::string& key : keys) ours.push_back(keyOf(key));
  // Only rank 0 itself could begin another generation.
  if (rank_ == 0) return store_.get(ours, deadline);
  for (auto look = kFirstLook;; look = std::min(2 * look, kLastLook)) {
    const Deadline slice = deadline.earlier(Deadline::after(look));
    auto values = store_.get(ours, slice);
    const bool isLate = !values.ok() && values.error().code == ErrorCode::kTimeout;
    if (!isLate) return values;
    if (hasSuccessor()) {
      return Error{ErrorCode::kInterrupted,
                   "rank 0 has begun to make the group another time, without us"};
    }
    if (deadline.passed()) return values;
  }
}

Result<bool> Generation::present(const std::string& key) { return store_.present(keyOf(key)); }

}  // namespace mooncake
