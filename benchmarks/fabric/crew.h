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

// The processes of one measurement. Over TCP they exchange addresses and keys, and wait for each
// other. The measured data goes over the cards.
class Crew {
 public:
  // Rank 0 listens at HOST:PORT. The others connect there, for up to a minute.
  Crew(int rank, int size, const std::string& meetingPoint);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(size_); }
  // Returns the messages of all ranks, in rank order.
  std::vector<Bytes> exchange(ByteView mine);
  void barrier() { exchange({}); }

 private:
  const int rank_;
  const size_t size_;
  std::vector<Fd> others_;  // on rank 0: by rank; elsewhere: rank 0
};

// Starts this program again for ranks 1 to `size` - 1, with a free port of 127.0.0.1 as meeting
// point, and returns that. They end with this process.
std::string startOthers(int size, char** arguments);

}  // namespace mooncake::bench
