#pragma once

#include <functional>
#include <sys/types.h>

// Processes of the probe, and their links. The program forks before it initialises the driver.
namespace probe {

// Starts a process that runs the function, and that dies with its parent. `leadsGroup`: it leads a
// process group of its own, so that stop() also ends the processes that it starts.
pid_t start(const std::function<void()>& run, bool leadsGroup);
// Waits until the process has ended. Returns its status of waitpid(), or -1 once the seconds are
// over: the process and its group are then killed.
int finish(pid_t process, double seconds);

// Two ends of a connection. A receive fails after some seconds.
struct Link {
  int near = -1, far = -1;
};
Link makeLink();
void sendDescriptor(int to, int descriptor);
int receiveDescriptor(int from);
void sendBytes(int to, const void* bytes, size_t count);
void receiveBytes(int from, void* bytes, size_t count);

}  // namespace probe
