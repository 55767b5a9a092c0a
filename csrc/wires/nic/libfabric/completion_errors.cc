#include "wires/nic/libfabric/completion_errors.h"

#include <optional>
#include <rdma/fi_errno.h>

namespace mooncake {
namespace {

// efa: up to 4095 the device's status, from 4096 on the provider's own (prov/efa/src/efa_errno.h).
std::optional<NicError> ofEfa(int status) {
  switch (status) {
    case 7:   // the key is not registered, or does not fit the address
    case 11:  // the peer's posted buffer is too short
      return NicError::kRefused;
    case 8:     // reset by the peer
    case 9:     // the peer has no such queue pair: its process is gone
    case 10:    // the peer has posted no receive
    case 12:    // an unexpected answer
    case 13:    // the peer has answered before, and does not any more
    case 14:    // the peer does not know us (yet, or any more)
    case 15:    // the peer has never answered
    case 4124:  // the provider's number for 13
    case 4126:  // the provider's number for 15, or for a missing handshake
      return NicError::kUnreachable;
    case 1:  // flushed, as our queue pair is destroyed
      return NicError::kCancelled;
    case 2:  // our queue pair is broken
    case 3:
    case 4:
    case 5:
    case 6:
      return NicError::kDevice;
    default:
      return std::nullopt;
  }
}

// verbs: the status of ibv_wc.
std::optional<NicError> ofVerbs(int status) {
  switch (status) {
    case 9:   // IBV_WC_REM_INV_REQ_ERR
    case 10:  // IBV_WC_REM_ACCESS_ERR
      return NicError::kRefused;
    case 5:   // IBV_WC_WR_FLUSH_ERR: the connection broke earlier
    case 11:  // IBV_WC_REM_OP_ERR
    case 12:  // IBV_WC_RETRY_EXC_ERR
    case 13:  // IBV_WC_RNR_RETRY_EXC_ERR
    case 19:  // IBV_WC_RESP_TIMEOUT_ERR
      return NicError::kUnreachable;
    case 2:   // IBV_WC_LOC_QP_OP_ERR
    case 4:   // IBV_WC_LOC_PROT_ERR
    case 18:  // IBV_WC_FATAL_ERR
      return NicError::kDevice;
    default:
      return std::nullopt;
  }
}

}  // namespace

NicError nicErrorOf(std::string_view provider, int error, int ofProvider) {
  std::optional<NicError> known;
  if (provider.starts_with("efa")) known = ofEfa(ofProvider);
  if (provider.starts_with("verbs")) known = ofVerbs(ofProvider);
  if (known) return *known;
  switch (error) {
    case FI_EACCES:
    case FI_EPERM:
    case FI_EINVAL:
    case FI_EFAULT:
    case FI_ENOKEY:
    case FI_EKEYREJECTED:
    case FI_EMSGSIZE:
    case FI_ETRUNC:
    case FI_ETOOSMALL:
      return NicError::kRefused;
    case FI_ENODEV:
    case FI_ENETDOWN:
    case FI_EOPBADSTATE:
    case FI_EOVERRUN:
      return NicError::kDevice;
    default:
      // This includes FI_ECANCELED: the operation was under way when a connection broke.
      // Cancellations of our own do not need this translation.
      return NicError::kUnreachable;
  }
}

}  // namespace mooncake
