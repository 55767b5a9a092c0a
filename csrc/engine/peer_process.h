#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>

namespace mooncake {

// A process of this host, as /proc shows it: not by its number alone, which may become another
// one's. A process of another pid namespace is not visible, and neither of the questions below is
// ever answered with yes for it.
class PeerProcess {
 public:
  PeerProcess() = default;
  // `process`: a number of our pid namespace; 0: not visible from there.
  explicit PeerProcess(pid_t process);

  // Whether the whole process has ended or is on its way there: none of its threads runs a line of
  // the program any more. The end of single threads, whoever ended them, is not that. True from
  // before the kernel takes back the memory, which may take it a second.
  bool isEnding() const;
  // The process has crashed and writes its core dump, which can take minutes: its threads stand
  // still, and for isEnding() it is too early.
  bool isDumpingCore() const;
  pid_t number() const { return number_; }

 private:
  pid_t number_ = 0;
  uint64_t started_ = 0;  // in ticks since the start of the system; 0: could not be read
};

}  // namespace mooncake
