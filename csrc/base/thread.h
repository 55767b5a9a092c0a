#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "base/result.h"

namespace mooncake {

// Who gives a thread its name, of which the kernel keeps 15 characters.
enum class ThreadName : uint8_t {
  kGiven,   // startThread(), before it returns
  kItsOwn,  // the body, at the moment that its name is to show
};

// Starts a thread on which no signal handler of the application runs. kExhausted names the thread
// when the system has no further thread or no memory for its stack. Every thread of this library
// starts here: std::thread throws, and what leaves a thread or a destructor ends the process.
Result<std::thread> startThread(const std::string& name, std::function<void()> body,
                                ThreadName named = ThreadName::kGiven);

}  // namespace mooncake
