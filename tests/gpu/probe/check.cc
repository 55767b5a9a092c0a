#include "check.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <unistd.h>

#include "driver.h"

namespace probe {
namespace {

[[noreturn]] void fail(const char* call, const char* file, int line, const char* why) {
  const char* const slash = std::strrchr(file, '/');
  std::printf("FAILED %s:%d %s: %s\n", slash ? slash + 1 : file, line, call, why);
  std::fflush(stdout);
  ::_exit(kFailed);
}

}  // namespace

const char* nameOf(CUresult result) {
  static thread_local char number[32];
  const char* name = nullptr;
  if (result == CUDA_SUCCESS) return "ok";
  if (driver.cuGetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr) return name;
  std::snprintf(number, sizeof(number), "error %d", int(result));
  return number;
}

void check(CUresult result, const char* call, const char* file, int line) {
  if (result != CUDA_SUCCESS) fail(call, file, line, nameOf(result));
}

int checkSystem(int result, const char* call, const char* file, int line) {
  if (result < 0) fail(call, file, line, std::strerror(errno));
  return result;
}

}  // namespace probe
