#include "ep/shared_rows.h"

#include <algorithm>

namespace mooncake::ep {

namespace {

size_t countRanks(const std::vector<std::vector<int>>& hosts) {
  size_t count = 0;
  for (const auto& host : hosts) count += host.size();
  return count;
}

size_t roundedUpRatio(size_t a, size_t b) { return (a + b - 1) / b; }

// Most sources that push to one rank. All ranks of a host count, also lost ones: a source keeps
// its place for the life of the buffer.
size_t mostPushed(const std::vector<std::vector<int>>& all) {
  const size_t ranks = countRanks(all);
  size_t most = 0;
  for (const auto& host : all)
    most = std::max(most, roundedUpRatio(ranks - host.size(), host.size()));
  return most;
}

// Most sources from which one rank fetches rows for its host, in any attempt. The worst case is a
// host that has shrunk to two ranks while all other hosts are whole: a lone rank fetches for
// itself.
size_t mostFetched(const std::vector<std::vector<int>>& all) {
  const size_t ranks = countRanks(all);
  size_t most = 0;
  for (const auto& host : all) {
    if (host.size() > 1) most = std::max(most, roundedUpRatio(ranks - host.size(), 2));
  }
  return most;
}

}  // namespace

SharedRows::SharedRows(const Hosts& hosts, const std::vector<int>& ranks, size_t rowsBytes,
                       size_t mostInlineRows)
    : all_(hosts.all()),
      table_(hosts.tableOf(ranks)),
      rowsBytes_(rowsBytes),
      mostInlineRows_(mostInlineRows) {
  const auto fits = [&](size_t places) { return places * rowsBytes_ <= hosts.leastSendBytes(); };
  const size_t own = all_->size(), pushed = mostPushed(all_->hosts()),
               fetched = mostFetched(all_->hosts());
  arePushed_ = fits(own + pushed + fetched);
  areShared_ = fits(own + fetched);
  fetchedAt_ = own + (arePushed_ ? pushed : 0);
  ownEnd_ = areShared_ ? own * rowsBytes_ : hosts.leastSendBytes();
}

size_t SharedRows::mostPlaces(const Hosts& hosts) {
  const auto& all = hosts.all()->hosts();
  return all.size() + mostPushed(all) + mostFetched(all);
}

// Deals the sources of other hosts out to the ranks of this host in turn.
SharedRows::Place SharedRows::place(int source, int hostMember, const HostTable& table) {
  const auto& host = table.hostOf(hostMember);
  const size_t index = table.countBelow(source, size_t(table.indexOf(hostMember)));
  return {host[index % host.size()], index / host.size()};
}

SharedRows::Place SharedRows::fetched(int source, const std::vector<int>& host) const {
  const auto [by, index] = place(source, host.front(), *table_);
  return {by, (fetchedAt_ + index) * rowsBytes_};
}

std::optional<SharedRows::Place> SharedRows::pushed(int source,
                                                    const std::vector<int>& host) const {
  if (!arePushed_) return std::nullopt;
  const auto [by, index] = place(source, host.front(), *all_);
  if (!std::ranges::binary_search(host, by)) return std::nullopt;
  return Place{by, (all_->size() + index) * rowsBytes_};
}

}  // namespace mooncake::ep
