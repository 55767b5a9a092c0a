#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "base/bytes.h"

namespace mooncake {

// A set of ranks, each below kLimit. A value: small sets of low ranks are small. Sets of different
// numberings do not convert into each other, and no operator takes both.
template <typename Numbering>
class RankSetOf {
 public:
  static constexpr int kLimit = 4096;

  RankSetOf() = default;
  RankSetOf(std::initializer_list<int> ranks) {
    for (const int rank : ranks) add(rank);
  }
  // 0, 1, ... count - 1.
  static RankSetOf firstRanks(int count) {
    RankSetOf set;
    for (int rank = 0; rank < count; ++rank) set.add(rank);
    return set;
  }

  // A rank outside of [0, kLimit) is in no set.
  bool contains(int rank) const {
    const size_t word = static_cast<unsigned>(rank) / kBits;
    return word < words_.size() && (words_[word] >> (rank % kBits) & 1) != 0;
  }
  bool empty() const { return words_.empty(); }
  int count() const {
    int sum = 0;
    for (const uint64_t word : words_) sum += std::popcount(word);
    return sum;
  }
  // The set must not be empty.
  int lowest() const {
    size_t word = 0;
    while (words_[word] == 0) ++word;
    return static_cast<int>(word * kBits) + std::countr_zero(words_[word]);
  }
  // The highest rank plus one; 0 for an empty set.
  int end() const {
    return static_cast<int>(words_.size() * kBits) -
           (words_.empty() ? 0 : std::countl_zero(words_.back()));
  }
  bool isSubsetOf(const RankSetOf& other) const {
    if (words_.size() > other.words_.size()) return false;
    for (size_t i = 0; i < words_.size(); ++i) {
      if ((words_[i] & ~other.words_[i]) != 0) return false;
    }
    return true;
  }

  void add(int rank) {
    const size_t word = static_cast<size_t>(rank) / kBits;
    if (words_.size() <= word) words_.resize(word + 1);
    words_[word] |= uint64_t(1) << (rank % kBits);
  }
  RankSetOf& operator|=(const RankSetOf& other) {
    if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
    for (size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
    return *this;
  }
  RankSetOf& operator&=(const RankSetOf& other) {
    words_.resize(std::min(words_.size(), other.words_.size()));
    for (size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
    return trim();
  }
  RankSetOf& operator-=(const RankSetOf& other) {
    const size_t common = std::min(words_.size(), other.words_.size());
    for (size_t i = 0; i < common; ++i) words_[i] &= ~other.words_[i];
    return trim();
  }
  friend RankSetOf operator|(RankSetOf a, const RankSetOf& b) { return a |= b; }
  friend RankSetOf operator&(RankSetOf a, const RankSetOf& b) { return a &= b; }
  friend RankSetOf operator-(RankSetOf a, const RankSetOf& b) { return a -= b; }
  bool operator==(const RankSetOf&) const = default;

  // Visits the ranks in ascending order.
  template <typename Visit>
  void forEach(Visit visit) const {
    for (size_t i = 0; i < words_.size(); ++i) {
      for (uint64_t word = words_[i]; word != 0; word &= word - 1) {
        visit(static_cast<int>(i * kBits) + std::countr_zero(word));
      }
    }
  }

  // Wire form: u32 bytes (<= kLimit / 8), then one bit per rank, the lowest first.
  void write(ByteWriter& out) const { out.putBytes(std::as_bytes(std::span(words_))); }
  static RankSetOf read(ByteReader& in) {
    const ByteView raw = in.getBytes(kLimit / 8);
    RankSetOf set;
    set.words_.resize(raw.size() / sizeof(uint64_t) + 1);
    std::ranges::copy(raw, std::as_writable_bytes(std::span(set.words_)).begin());
    return set.trim();
  }

 private:
  static constexpr unsigned kBits = 64;

  // Drops zero words at the end, so that equal sets have equal words.
  RankSetOf& trim() {
    while (!words_.empty() && words_.back() == 0) words_.pop_back();
    return *this;
  }

  std::vector<uint64_t> words_;
};

// Ranks of the job, by global rank.
using JobRanks = RankSetOf<struct JobNumbering>;
// Ranks of one group, by their place in it. The member of a group with place r has the global rank
// that the group's list of members names at r.
using GroupRanks = RankSetOf<struct GroupNumbering>;

}  // namespace mooncake
