#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "base/result.h"

namespace mooncake {

// Chooses where a thread gets its name, of which the kernel keeps 15 characters.
enum class ThreadName : uint8_t {
  kGiven,   // from startThread(), before it returns
  kItsOwn,  // from the body, at the moment when the name is to show
};

// Starts a thread that runs no signal handler of the application. kExhausted, which names the
// thread, means that the system allows no more threads or has no memory for the stack. Every thread
// of this library starts here: std::thread throws, and an exception that leaves a thread or a
// destructor ends the process.
Result<std::thread> startThread(const std::string& name, std::function<void()> body,
                                ThreadName named = ThreadName::kGiven);

}  // namespace mooncake
