#include "base/result.h"

#include <cerrno>
#include <system_error>

#include "base/descriptors.h"

namespace mooncake {

const char* errorCodeName(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "ok";
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kAborted:
      return "aborted";
    case ErrorCode::kPeerLost:
      return "peer lost";
    case ErrorCode::kRefused:
      return "refused";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kExhausted:
      return "exhausted";
    case ErrorCode::kSystem:
      return "system error";
    case ErrorCode::kProtocol:
      return "protocol error";
    case ErrorCode::kInterrupted:
      return "interrupted";
    case ErrorCode::kInputsLost:
      return "inputs lost";
    case ErrorCode::kEvicted:
      return "evicted";
    case ErrorCode::kMinority:
      return "minority";
    case ErrorCode::kMoved:
      return "moved";
  }
  return "unknown error";  // a number that came off a wire
}

Error systemError(const std::string& call, int errnoValue) {
  std::string text = call + ": " + std::generic_category().message(errnoValue);
  if (errnoValue == EMFILE) text += ": " + describeDescriptorLimit();
  const bool isExhausted = errnoValue == EMFILE || errnoValue == ENFILE;
  return Error{isExhausted ? ErrorCode::kExhausted : ErrorCode::kSystem, std::move(text)};
}

}  // namespace mooncake
