#pragma once

#include <cuda.h>

namespace probe {

enum ExitStatus { kDone = 0, kCannotStart = 2, kFailed = 3 };

const char* nameOf(CUresult result);

// Ends the process with kFailed, and says where and why, unless the result is CUDA_SUCCESS.
void check(CUresult result, const char* call, const char* file, int line);
// The same for a call of the system that returned `result`, and less than 0 for an error.
int checkSystem(int result, const char* call, const char* file, int line);

}  // namespace probe

#define CHECKED(call) ::probe::check(call, #call, __FILE__, __LINE__)
#define CHECKED_SYSTEM(call) ::probe::checkSystem(call, #call, __FILE__, __LINE__)
