#pragma once

#include "base/result.h"

namespace mooncake::transfer {

// Codes that the transfer engine returns to its callers: 0 is success, errors are negative. The
// numbers are Mooncake's.
enum Code : int {
  kGood = 0,
  kInvalid = -1,
  kTooMany = -2,
  kNotRegistered = -3,
  kBatchBusy = -4,
  kNoDevice = -6,
  kOverlap = -7,
  kUnknownHost = -101,
  kSocket = -102,
  kMalformed = -103,
  kHandshakeRefused = -104,
  kNoMetadata = -200,
  kEndpoint = -201,
  kContext = -202,
  kMemory = -302,
  kNotImplemented = -303,
};

// Translates the error of an attempt to reach a peer. kSystem means a host name that does not
// resolve.
inline Code codeOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return kGood;
    case ErrorCode::kSystem:
      return kUnknownHost;
    case ErrorCode::kPeerLost:
    case ErrorCode::kTimeout:
      return kSocket;
    case ErrorCode::kProtocol:
      return kMalformed;
    case ErrorCode::kRefused:
      return kHandshakeRefused;
    case ErrorCode::kMismatch:
      return kNoMetadata;
    case ErrorCode::kExhausted:
    case ErrorCode::kAborted:
      return kContext;
    case ErrorCode::kUnsupported:
      return kNotImplemented;
    default:
      return kInvalid;
  }
}

}  // namespace mooncake::transfer
