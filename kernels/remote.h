#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/proxy/command.h"

// Ranks of a kernel's group on other hosts. No rank loads their memory: each writes its data for them
// into their inboxes, through its proxy. Data for all ranks go to one inbox of each host, where all its
// ranks read them. Plain data, part of GroupState.
namespace mooncake::kernels {

constexpr int kMaxRemoteRanks = 32;   // kMaxRanks
constexpr int kMaxRemoteBlocks = 16;  // kMaxBlocks
constexpr unsigned kMostBanks = 3;    // see GroupState::banks

// The regions of each rank's proxy.
constexpr uint32_t kOwnRegion = 0;    // begins with the banks that the rank publishes
constexpr uint32_t kInboxRegion = 1;  // the inboxes of all remote ranks

// The last command of a block for a remote rank in an exchange. The wire keeps no order, so it counts
// the commands before it.
struct Mail {
  uint64_t signal;  // as in Signals::words
  uint64_t count;   // of the block's commands to this rank so far, this one included
  uint64_t check;   // of the two: a mail may be read while it arrives
  uint64_t unused;
};

// Each block tells a remote rank that its data have left, and block 0 then that its rank has all
// data of all ranks. So no rank ends an operation that another one could not end with the same data.
enum class MailKind : uint32_t { kData, kHasAll };
constexpr uint32_t kMailKinds = 2;

// Consecutive exchanges have different mails, as they have different banks.
struct Mails {
  Mail of[kMailKinds][kMostBanks][kMaxRemoteBlocks];
};

// In memory of the rank's own device.
struct Remote {
  uint64_t ranks = 0;  // bits
  ProxyView proxy = {};
  uint64_t hosts[kMaxRemoteRanks] = {};  // by rank: bits of the ranks on its host
  // The memory that a remote rank may write here: Mails | banks. A bank has `inboxBankBytes`.
  unsigned char* inboxes[kMaxRemoteRanks] = {};
  // Memory of the inboxes of each rank on this host, with the same places for all.
  unsigned char* regions[kMaxRemoteRanks] = {};
  size_t inboxBankBytes = 0;
  uint64_t inboxAt[kMaxRemoteRanks] = {};  // offset of this rank's inbox in the peer's region
  Mails* outgoing = nullptr;               // one for each rank, in kOwnRegion
  uint64_t outgoingAt = 0;                 // offset
  uint64_t pushed[kMaxRemoteRanks][kMaxRemoteBlocks] = {};  // commands that name the block's word
  // Commands in a rank's ring when this rank had all data of an exchange, for each bank.
  uint32_t used[kMostBanks][kMaxRemoteRanks] = {};
  // Not 0: a command for the rank was refused. It gets no more commands, so no wrong data.
  uint32_t isCutOff[kMaxRemoteRanks] = {};
};

}  // namespace mooncake::kernels
