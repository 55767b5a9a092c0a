#include "engine/rendezvous/address_book.h"

#include <optional>

#include "base/crypto.h"

namespace mooncake {
namespace {

constexpr size_t kJobKeyBytes = 32;
// With what it has.
constexpr auto kStoreAnswers = std::chrono::seconds(5);

std::string memberKey(const std::string& what, int rank) {
  return "mooncake/" + what + "/" + std::to_string(rank);
}

ByteView viewOf(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

Result<std::vector<Bytes>> exchange(Store& store, const std::string& what, int rank, int size,
                                    ByteView mine, Deadline deadline) {
  MOONCAKE_TRY(store.set(memberKey(what, rank), mine));
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(memberKey(what, r));
  auto values = store.get(keys, deadline);
  if (values.ok() || values.error().code != ErrorCode::kTimeout) return values;

  std::string missing;
  for (int r = 0; r < size; ++r) {
    const auto there = store.present(keys[r]);
    if (there.ok() && !*there) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
  }
  return Error{ErrorCode::kTimeout,
               missing.empty()
                   ? values.error().message
                   : "rank(s) " + missing + " of " + std::to_string(size) +
                         " did not come to make the group in time (are they alive, and do they "
                         "make the same groups in the same order?)"};
}

Result<Bytes> agreeOnJobKey(Store& store, const std::optional<std::string>& own, int rank,
                            Deadline deadline) {
  if (own) {
    const ByteView key = viewOf(*own);
    return Bytes(key.begin(), key.end());
  }
  const std::string name = "mooncake/job_key";
  if (rank == 0) {
    const std::string made = Crypto::randomHex(kJobKeyBytes);
    const ByteView key = viewOf(made);
    MOONCAKE_TRY(store.set(name, key));
    return Bytes(key.begin(), key.end());
  }
  auto values = store.get({name}, deadline);
  if (values.ok()) return std::move(values->front());
  if (values.error().code != ErrorCode::kTimeout) return values.error();
  return Error{
      ErrorCode::kTimeout,
      "rank 0, which hands out the job's key, did not come to make the group in time (is it "
      "alive?)"};
}

Error tellFailure(Store& store, int rank, Error own) {
  const std::string name = "mooncake/failed";
  const auto told = store.present(name);
  if (!told.ok()) return own;  // the store may be what is gone
  if (!*told) {
    (void)store.set(name, viewOf("rank " + std::to_string(rank) + ": " + own.message));
    return own;
  }
  if (own.code == ErrorCode::kInvalidArgument || own.code == ErrorCode::kMismatch) return own;
  if (const auto first = store.get({name}, Deadline::after(kStoreAnswers)); first.ok()) {
    own.message += "; the first to fail was ";
    for (const std::byte character : first->front()) own.message += char(character);
  }
  return own;
}

}  // namespace mooncake
