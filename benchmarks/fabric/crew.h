#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"

namespace mooncake::bench {

[[noreturn]] void die(const std::string& message);

template <typename T>
T orDie(Result<T> result) {
  if (!result.ok()) die(result.error().message);
  return std::move(*result);
}
inline void orDie(const Status& status) {
  if (!status.ok()) die(status.error().message);
}

// The processes of one measurement. They tell each other addresses and keys, and wait for each
// other, over TCP; what is measured goes elsewhere.
class Crew {
 public:
  // Rank 0 listens at HOST:PORT, the others call there, for up to a minute.
  Crew(int rank, int size, const std::string& meetingPoint);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(size_); }
  // Everybody's, in the order of ranks.
  std::vector<Bytes> exchange(ByteView mine);
  void barrier() { exchange({}); }

 private:
  const int rank_;
  const size_t size_;
  std::vector<Fd> others_;  // of rank 0: by rank; else: rank 0
};

// Starts this program anew for the ranks 1 to `size` - 1, all at a free port of 127.0.0.1, and
// returns that meeting point. They end with this process.
std::string startOthers(int size, char** arguments);

}  // namespace mooncake::bench
