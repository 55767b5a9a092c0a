#include "engine/rendezvous/address_book.h"

#include "base/crypto.h"
#include "base/rank_list.h"

namespace mooncake {
namespace {

// A member publishes:  nonce [32]  bytes value
// and appends its rank to the list of arrived ranks:  u32 rank
// Rank 0 confirms:     the nonces of all, in rank order
constexpr size_t kMostValue = 1 << 20;
// Time for the list of ranks that have come. A store that is silent has held us up for long enough.
constexpr auto kListComes = std::chrono::seconds(1);
// Time for the store to answer a request for a key that it has.
constexpr auto kStoreAnswers = std::chrono::seconds(5);

std::string memberKey(const std::string& what, int rank) {
  return what + "/" + std::to_string(rank);
}

ByteView viewOf(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string confirmationKey(const std::string& what) { return what + "/confirmed"; }
std::string latercomersKey(const std::string& what) { return what + "/later"; }

std::string arrivalsKey(const std::string& what) { return what + "/arrived"; }

// Names the ranks that have not come, or returns the store's own error. Asks for the list instead of
// each member's key: all members come here at once, and the store would have to answer the square of
// their number.
Error whoIsMissing(Store& store, const std::string& what, int rank, int size, const Error& why) {
  const auto arrivals = store.get({arrivalsKey(what)}, Deadline::after(kListComes));
  if (!arrivals.ok()) return why;
  std::vector<bool> isHere(static_cast<size_t>(size));
  for (ByteReader in(arrivals->front()); in.left() >= sizeof(uint32_t);) {
    const auto r = in.get<uint32_t>();
    if (r < isHere.size()) isHere[r] = true;
  }
  std::vector<int> missing;
  for (int r = 0; r < size; ++r) {
    if (!isHere[size_t(r)]) missing.push_back(r);
  }
  const std::string stale =
      rank == 0 ? "" : ". What the store holds may come from an earlier attempt";
  if (missing.empty()) {
    if (rank == 0) return why;
    return {ErrorCode::kTimeout,
            "rank 0 did not confirm in time that all ranks are there (is it alive?)" + stale};
  }
  return {ErrorCode::kTimeout, nameRanks(missing) + " of " + std::to_string(size) +
                                   " did not come to make the group in time (are they alive, and "
                                   "do they make the same groups in the same order?)" +
                                   stale};
}

}  // namespace

Result<std::vector<Bytes>> exchange(Store& store, const std::string& what, int rank, int size,
                                    ByteView mine, Deadline deadline) {
  const Nonce nonce = Crypto::randomNonce();
  MOONCAKE_TRY(store.set(memberKey(what, rank), ByteWriter().putRaw(nonce).putBytes(mine).bytes()));
  // Only an error needs the list, and a store of the program's may know no such request.
  (void)store.append(arrivalsKey(what), ByteWriter().put(static_cast<uint32_t>(rank)).bytes());
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(memberKey(what, r));
  const std::string confirmation = confirmationKey(what);
  if (rank != 0) keys.push_back(confirmation);
  auto found = store.get(keys, deadline);
  if (!found.ok()) {
    if (found.error().code != ErrorCode::kTimeout) return found.error();
    return whoIsMissing(store, what, rank, size, found.error());
  }
  std::vector<Bytes> values;
  Bytes nonces;
  for (int r = 0; r < size; ++r) {
    ByteReader in((*found)[size_t(r)]);
    const ByteView theirs = in.getRaw(sizeof(Nonce));
    nonces.insert(nonces.end(), theirs.begin(), theirs.end());
    const ByteView value = in.getBytes(kMostValue);
    MOONCAKE_TRY(in.finish("what rank " + std::to_string(r) + " published"));
    values.emplace_back(value.begin(), value.end());
  }
  if (rank == 0) MOONCAKE_TRY(store.set(confirmation, nonces));
  if (rank != 0 && found->back() != nonces) {
    return Error{ErrorCode::kInterrupted,
                 "what the store holds under this name comes from an earlier attempt"};
  }
  return values;
}

// The confirmation tells how many members there are.
Result<std::vector<Bytes>> published(Store& store, const std::string& what, Deadline deadline) {
  const auto hasEnded = store.present(confirmationKey(what));
  if (!hasEnded.ok()) return hasEnded.error();
  if (!*hasEnded) return Error{ErrorCode::kRefused, "the job in the store has not begun yet"};
  const auto confirmation = store.get({confirmationKey(what)}, deadline);
  if (!confirmation.ok()) return confirmation.error();
  const auto size = int(confirmation->front().size() / sizeof(Nonce));
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(memberKey(what, r));
  auto found = store.get(keys, deadline);
  if (!found.ok()) return found.error();
  std::vector<Bytes> values;
  const auto later = store.present(latercomersKey(what));
  if (later.ok() && *later) {
    const auto list = store.get({latercomersKey(what)}, deadline);
    if (!list.ok()) return list.error();
    for (ByteReader in(list->front()); in.left() > 0 && !in.failed();) {
      const ByteView value = in.getBytes(kMostValue);
      if (!in.failed()) values.emplace(values.begin(), value.begin(), value.end());
    }
  }
  for (int r = 0; r < size; ++r) {
    ByteReader in((*found)[size_t(r)]);
    in.getRaw(sizeof(Nonce));
    const ByteView value = in.getBytes(kMostValue);
    MOONCAKE_TRY(in.finish("what rank " + std::to_string(r) + " published"));
    values.emplace_back(value.begin(), value.end());
  }
  return values;
}

Status publishLater(Store& store, const std::string& what, ByteView value) {
  return store.append(latercomersKey(what), ByteWriter().putBytes(value).bytes());
}

Error tellFailure(Store& store, int rank, Error own) {
  const std::string name = "failed";
  const auto told = store.present(name);
  if (!told.ok()) return own;  // perhaps the store itself is gone
  if (!*told) {
    (void)store.set(name, viewOf("rank " + std::to_string(rank) + ": " + own.message));
    return own;
  }
  if (own.code == ErrorCode::kInvalidArgument || own.code == ErrorCode::kMismatch) return own;
  if (const auto first = store.get({name}, Deadline::after(kStoreAnswers)); first.ok()) {
    std::string text;
    for (const std::byte character : first->front()) text += char(character);
    // Ranks that fail for the same reason would only repeat it.
    if (text.find(own.message) == text.npos) own.message += "; the first to fail was " + text;
  }
  return own;
}

}  // namespace mooncake
