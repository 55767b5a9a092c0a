#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>

namespace mooncake {

// A process of this host, as /proc shows it. Its number alone does not identify it, because another
// process may get the number later. A process of another pid namespace is not visible: for it, both
// questions below are always answered with no.
class PeerProcess {
 public:
  PeerProcess() = default;
  // `process`: its number in our pid namespace; 0: not visible there.
  explicit PeerProcess(pid_t process);

  // Returns whether the whole process has ended or is ending: none of its threads runs the program
  // any more. The end of single threads does not count, whatever ended them. True before the kernel
  // takes back the memory, which may take a second.
  bool isEnding() const;
  // Returns whether the process has crashed and is writing its core dump, which can take minutes.
  // Its threads stand still, and isEnding() is not true yet.
  bool isDumpingCore() const;
  pid_t number() const { return number_; }

 private:
  pid_t number_ = 0;
  uint64_t started_ = 0;  // in ticks since the system's start; 0: could not be read
};

}  // namespace mooncake
