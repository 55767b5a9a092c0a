#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "wires/nic/libfabric/operations.h"

namespace mooncake {

// The peers of one card: each number's state, and the addresses in the provider's table. Numbers
// are never reused. Numbers with the same address share a table entry. Removing an address while
// operations refer to it is undefined, and it may come back before the last of them is over.
class NicPeers {
 public:
  struct Address {
    fi_addr_t entry = FI_ADDR_UNSPEC;
    size_t users = 0;
  };
  struct Peer {
    std::shared_ptr<Address> address;
    bool isRemoved = false;
    size_t underWay = 0;        // operations that the provider has
    uint64_t lastProgress = 0;  // on the card's clock
    std::deque<NicOperation*> queue;
  };

  Peer* find(NicPeer number) { return number < peers_.size() ? &peers_[number] : nullptr; }
  std::deque<Peer>& all() { return peers_; }

  // `enter` puts the address into the provider's table.
  template <typename Enter>
  Result<NicPeer> insert(const Bytes& address, Enter enter) {
    if (const auto known = numbers_.find(address); known != numbers_.end()) return known->second;
    std::shared_ptr<Address>& shared = addresses_[address];
    if (!shared) {
      shared = std::make_shared<Address>();
      if (const Status entered = enter(shared->entry); !entered.ok()) {
        addresses_.erase(address);
        return entered.error();
      }
    }
    ++shared->users;
    peers_.push_back({.address = shared});
    return numbers_[address] = peers_.size() - 1;
  }

  // From now on the number cannot be used. The caller calls letGo() once nothing is under way to
  // it.
  void remove(NicPeer number) {
    peers_[number].isRemoved = true;
    std::erase_if(numbers_, [&](const auto& known) { return known.second == number; });
  }

  // `leave` removes an unused address from the provider's table.
  template <typename Leave>
  void letGo(Peer& peer, Leave leave) {
    if (!peer.isRemoved || !peer.address || peer.underWay != 0) return;
    const std::shared_ptr<Address> address = std::move(peer.address);
    if (--address->users != 0) return;
    std::erase_if(addresses_, [&](const auto& one) { return one.second == address; });
    leave(address->entry);
  }

 private:
  std::deque<Peer> peers_;
  std::map<Bytes, NicPeer> numbers_;  // without removed peers
  std::map<Bytes, std::shared_ptr<Address>> addresses_;
};

}  // namespace mooncake
