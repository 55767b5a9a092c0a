#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/mooncake_backend.h"

namespace mooncake {

// c10d's MergeOptions, if this torch has them.
template <typename Group>
struct MergeOptionsIn {
  struct Type {};
};
template <typename Group>
requires requires { typename Group::MergeOptions; }
struct MergeOptionsIn<Group> {
  using Type = typename Group::MergeOptions;
};
template <typename Group>
using MergeOptionsOf = typename MergeOptionsIn<Group>::Type;

// A process group with one backend, ours. Groups that are split from it or merged from it have this
// class, too. Without it, c10d names all groups of backends that it does not know "custom".
class NamedGroup final : public c10d::ProcessGroup {
 public:
  NamedGroup(c10::intrusive_ptr<c10d::Store> store,
             const c10::intrusive_ptr<c10d::Backend>& backend,
             const std::vector<c10::Device>& devices);
  const std::string getBackendName() const override { return name_; }
  // The group may have grown.
  int getSize() const override { return ours_ ? ours_->group().size() : ProcessGroup::getSize(); }
  // c10d implements these two for the backends that it knows; newer torch has no longer the first.
  // Our backend counts from the beginning, so there is nothing to set.
  virtual void setSequenceNumberForGroup() {}
  uint64_t getSequenceNumberForGroup() override {
    return getDefaultBackend()->getSequenceNumberForGroup();
  }

  // c10d has splitGroup() and mergeRemoteGroup() since torch 2.9, and splitGroup() with a sixth
  // argument since some later version. These override c10d's functions as far as they exist, so
  // none of them says `override`.
  using Duration = std::optional<std::chrono::milliseconds>;
  using SplitOptions = std::optional<c10::intrusive_ptr<c10d::Backend::Options>>;
  using Name = std::optional<std::string>;
  using Devices = std::optional<std::vector<c10::Device>>;
  virtual c10::intrusive_ptr<ProcessGroup> splitGroup(const std::vector<int>& ranks,
                                                      const Duration& timeout,
                                                      const SplitOptions& options, const Name& name,
                                                      const Name& description) {
    return split<ProcessGroup>(ranks, timeout, options, name, description);
  }
  virtual c10::intrusive_ptr<ProcessGroup> splitGroup(const std::vector<int>& ranks,
                                                      const Duration& timeout,
                                                      const SplitOptions& options, const Name& name,
                                                      const Name& description,
                                                      const Devices& devices) {
    return split<ProcessGroup>(ranks, timeout, options, name, description, devices);
  }
  virtual c10::intrusive_ptr<ProcessGroup> mergeRemoteGroup(
      const c10::intrusive_ptr<c10d::Store>& store, const MergeOptionsOf<ProcessGroup>& options,
      const int& size) {
    return merge<ProcessGroup>(store, options, size);
  }

 private:
  template <typename Base, typename... Arguments>
  c10::intrusive_ptr<ProcessGroup> split(const Arguments&... arguments) {
    if constexpr (requires(Base & base) { base.splitGroup(arguments...); }) {
      const StoreWithoutClones borrowed(*this);
      return named(this->Base::splitGroup(arguments...));
    }
    return nullptr;  // this torch has no splitGroup(), and never calls it
  }
  template <typename Base, typename... Arguments>
  c10::intrusive_ptr<ProcessGroup> merge(const Arguments&... arguments) {
    if constexpr (requires(Base & base) { base.mergeRemoteGroup(arguments...); })
      return named(this->Base::mergeRemoteGroup(arguments...));
    return nullptr;
  }
  // While this lives, clone() of the group's store returns the store itself. For a split-off group,
  // torch would open another connection to the store's server. If the server is gone, torch retries
  // until the store's timeout is over. No group of ours needs a connection of its own: new_group()
  // shares one, too.
  class StoreWithoutClones {
   public:
    explicit StoreWithoutClones(NamedGroup& group) : group_(group), store_(group.store_) {
      group_.store_ = c10::make_intrusive<Stand>(store_);
    }
    ~StoreWithoutClones() { group_.store_ = store_; }
    StoreWithoutClones(const StoreWithoutClones&) = delete;
    StoreWithoutClones& operator=(const StoreWithoutClones&) = delete;

   private:
    // Without `override`: stores have clones since torch 2.9 only.
    class Stand final : public c10d::PrefixStore {
     public:
      explicit Stand(c10::intrusive_ptr<c10d::Store> store)
          : PrefixStore("", store), itself_(std::move(store)) {}
      c10::intrusive_ptr<c10d::Store> clone() { return itself_; }

     private:
      const c10::intrusive_ptr<c10d::Store> itself_;
    };

    NamedGroup& group_;
    const c10::intrusive_ptr<c10d::Store> store_;
  };
  // Makes an object of this class for the same group. Null stays null: this rank is not in the
  // group.
  template <typename Base>
  static c10::intrusive_ptr<ProcessGroup> named(const c10::intrusive_ptr<Base>& plain) {
    if (!plain) return nullptr;
    auto group = c10::make_intrusive<NamedGroup>(plain->getStore(), plain->getDefaultBackend(),
                                                 plain->getDeviceTypes());
    group->setBoundDeviceId(plain->getBoundDeviceId());
    group->setGroupName(plain->getGroupName());
    group->setGroupDesc(plain->getGroupDesc());
    return group;
  }

  const std::string name_;
  // Null: another backend. c10d's part of this object owns it; a reference from here, even a weak one,
  // would keep it until Python has ended.
  const MooncakeBackend* const ours_;
};

}  // namespace mooncake
