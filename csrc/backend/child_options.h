#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/backend_options.h"
#include "backend/live_group.h"

namespace mooncake {

// Options for a group of these ranks of a group, without a name. The list is the new group's rank
// order.
BackendOptions optionsOfChild(const LiveGroup& group, const std::vector<int>& ranks);
// The same for a group that is split off, with what the caller gives. Throws.
BackendOptions optionsOfSplit(const LiveGroup& group, const std::vector<int>& ranks,
                              const c10d::Backend::Options& opts);
// Options for a group that the group is merged into. Only used while it lives. Throws.
BackendOptions optionsOfMerge(const LiveGroup& group, const c10d::Backend::Options& opts);

// Options have a group name since torch 2.9. Older versions split no groups.
template <typename GivenOptions>
std::string groupNameIn(const GivenOptions& opts) {
  if constexpr (requires { opts.group_name; }) return opts.group_name;
  return {};
}
template <typename GivenOptions>
void nameGroup(GivenOptions& opts, const BackendOptions& group) {
  if constexpr (requires { opts.group_name; }) {
    opts.group_name = group.groupName;
    opts.global_ranks_in_group.assign(group.globalRanks.begin(), group.globalRanks.end());
  }
}

}  // namespace mooncake
