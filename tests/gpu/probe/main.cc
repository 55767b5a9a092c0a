// Asks the driver of a GPU for its behaviour in cases that the library relies on. answers.md has the
// meaning of each answer. Needs neither torch nor a build of the library; tests/gpu/carry.sh builds
// it, also for a machine that has no compiler.
//
//   probe IMAGE [--seconds S] [PART ...]    IMAGE: the file of the kernels
//
// Each part has processes and a time limit of its own. A part that hangs is killed, and the parts
// after it run. Exit status 0: all parts ended by themselves. 1: not all of them. 2: no driver, no
// device or no image.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <sys/wait.h>
#include <vector>

#include "check.h"
#include "clock.h"
#include "device.h"
#include "driver.h"
#include "parts.h"
#include "processes.h"

namespace probe {
namespace {

struct Part {
  std::string name;
  double seconds;
  std::function<void()> run;
  std::string heading;  // printed before the part
};

std::vector<Part> allParts() {
  std::vector<Part> parts = {
      {"device", 20, device, ""},
      {"graphs", 20, graphs, ""},
      {"addresses", 15, addresses, ""},
      {"latency", 15, latency, ""},
  };
  for (const char* count : {"", "32", "1"}) {
    const std::string setting = *count ? count : "unset";
    const std::string heading = "CUDA_DEVICE_MAX_CONNECTIONS " + setting;
    const auto with = [count](void (*run)()) {
      return [=] {
        if (*count) {
          ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", count, 1);
        } else {
          ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
        }
        run();
      };
    };
    parts.push_back({"streams", 25, with(streams), heading});
    parts.push_back({"queues", 20, with(queues), heading});
  }
  parts.push_back({"calls", 30, [] { calls(true); }, "while a kernel spins"});
  parts.push_back({"calls", 30, [] { calls(false); }, "while a stream waits for a word"});
  for (int ranks : {1, 2, 4, 8}) parts.push_back({"barrier", 20, [=] { barrier(ranks); }, ""});
  parts.push_back({"killed", 15, killedWhileRead, ""});
  parts.push_back({"killed", 15, killedWhileCopied, ""});
  return parts;
}

// Returns whether the part ended by itself.
bool runPart(const Part& part, double left) {
  if (!part.heading.empty()) std::printf("[%s] %s\n", part.name.c_str(), part.heading.c_str());
  const double seconds = std::min(part.seconds, left);
  if (seconds < 1) {
    std::printf("[%s] not run: no time left\n", part.name.c_str());
    return false;
  }
  const int status = finish(start(part.run, true), seconds);
  if (status == 0) return true;
  if (status < 0) {
    std::printf("[%s] STUCK for %.0f s: killed\n", part.name.c_str(), seconds);
  } else if (WIFSIGNALED(status)) {
    std::printf("[%s] ended by signal %d\n", part.name.c_str(), WTERMSIG(status));
  } else {
    std::printf("[%s] ended with status %d\n", part.name.c_str(), WEXITSTATUS(status));
  }
  return false;
}

int run(int count, char** words) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (count < 2) {
    std::fprintf(stderr, "usage: probe IMAGE [--seconds S] [PART ...]\n");
    return kCannotStart;
  }
  double seconds = 300;
  std::vector<std::string> wanted;
  for (int i = 2; i < count; ++i) {
    if (std::string(words[i]) == "--seconds" && i + 1 < count) {
      seconds = std::atof(words[++i]);
    } else {
      wanted.emplace_back(words[i]);
    }
  }
  if (const char* const why = loadDriver()) {
    std::printf("probe: this machine has no driver of CUDA: %s\n", why);
    return kCannotStart;
  }
  if (!readImage(words[1])) {
    std::printf("probe: cannot read the kernels in %s\n", words[1]);
    return kCannotStart;
  }
  const auto begin = Clock::now();
  bool isWhole = true;
  for (const Part& part : allParts()) {
    const bool isWanted = wanted.empty() || std::ranges::count(wanted, part.name) > 0;
    if (!isWanted) continue;
    const bool ended = runPart(part, seconds - millisecondsSince(begin) / 1e3);
    isWhole = isWhole && ended;
    if (!ended && part.name == "device") {
      std::printf("probe: the device cannot be used, so nothing else is asked\n");
      return kCannotStart;
    }
  }
  return isWhole ? kDone : 1;
}

}  // namespace
}  // namespace probe

int main(int count, char** words) { return probe::run(count, words); }
