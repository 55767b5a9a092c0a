#include "wires/cards/peer_cards.h"

#include <utility>

namespace mooncake {

void PeerCards::open(std::vector<Bytes> addresses) {
  addresses_ = std::move(addresses);
  entries_.assign(rails_.count(), std::nullopt);
}

void PeerCards::release() {
  for (size_t path = 0; path < entries_.size(); ++path) {
    if (const auto entry = std::exchange(entries_[path], std::nullopt))
      rails_[path].release(*entry);
  }
}

std::optional<RailPeer> PeerCards::at(size_t path) {
  auto& entry = entries_[path];
  if (entry && entry->generation == rails_.generation(path)) return entry;
  entry.reset();
  const auto inserted = rails_[path].insert(addresses_[cardOf(path)]);
  if (inserted.ok()) entry = *inserted;
  return entry;
}

void PeerCards::forget(size_t path) { entries_[path].reset(); }

std::vector<size_t> PeerCards::move(size_t card, const Bytes& address) {
  addresses_[card] = address;
  std::vector<size_t> paths;
  for (size_t path = card; path < entries_.size(); path += addresses_.size()) {
    if (const auto entry = std::exchange(entries_[path], std::nullopt))
      rails_[path].release(*entry);
    paths.push_back(path);
  }
  return paths;
}

}  // namespace mooncake
