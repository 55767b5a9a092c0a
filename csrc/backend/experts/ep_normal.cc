#include "backend/experts/ep_normal.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "backend/device/keep_until_passed.h"
#include "backend/device/stream_mark.h"
#include "backend/experts/ep_agreed.h"
#include "backend/experts/ep_normal_host.h"
#include "backend/experts/ep_normal_kernels.h"
#include "backend/experts/ep_normal_tensors.h"
#include "backend/experts/ep_tensors.h"
#include "base/hash.h"

namespace mooncake {
namespace {

using MaybeTensor = std::optional<at::Tensor>;
using Ends = EpBuffer::Ends;

constexpr size_t kMostWeights = 32;  // of a row, for a combine after a dispatch without any

void requireHomes(const EpNormal::Dispatch& given) {
  const c10::Device home = given.fields.front().device();
  for (size_t i = 0; i < given.fields.size(); ++i)
    requireHome(home, given.fields[i], "part " + std::to_string(i) + " of the rows");
  requireHome(home, given.activeRanks, "active_ranks");
}

// The pieces of a combine. At its end the caller's mask shows the ranks that took part in all.
class PiecesWork final : public EpWork {
 public:
  PiecesWork(std::vector<std::shared_ptr<EpWork>> works, std::vector<at::Tensor> masks,
             MaybeTensor activeRanks)
      : works_(std::move(works)), masks_(std::move(masks)), activeRanks_(std::move(activeRanks)) {}

  bool isCompleted() const override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }
  void wait() override {
    for (const auto& work : works_) work->wait();
    showMasks();
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
    showMasks();
  }

 private:
  void showMasks() {
    std::call_once(isShown_, [this] {
      for (const at::Tensor& mask : masks_) show(activeRanks_, mask.eq(0));
    });
  }

  const std::vector<std::shared_ptr<EpWork>> works_;
  const std::vector<at::Tensor> masks_;
  const MaybeTensor activeRanks_;
  std::once_flag isShown_;
};

}  // namespace

EpNormal::EpNormal(EpBuffer& buffer)
    : ours_(buffer),
      size_(buffer.buffer()->group().size()),
      rank_(buffer.buffer()->group().rank()) {}

void EpNormal::begin(int operations, bool isAlone) {
  due_ = operations;
  isAlone_ = isAlone;
}

// If the other ranks have skipped this rank in an operation, it ends well, and they wait in the
// next one.
bool EpNormal::refuse(const std::string& why) {
  const int due = std::exchange(due_, 0);
  for (int i = 0; i < due && !isAlone_; ++i) {
    try {
      ours_.submit({HostTokens(ours_).refusal(why), nullptr}, Ends::kAtOnce);
    } catch (const c10::ValueError&) {
      break;
    }
  }
  return due > 0;
}

void EpNormal::barrier() {
  const auto run = std::make_shared<CountRun>();
  run->mask = ours_.buffer()->callerMask();
  run->census.numbers = {0};
  ours_.submit({run, nullptr}, Ends::kAtOnce);
}

// Runs or enqueues an operation, with the same errors on all ranks. `more`: operations of the call
// that are due behind it.
std::shared_ptr<EpWork> EpNormal::carryOut(EpBuffer::Call call, int more) {
  due_ = 0;
  auto work = ours_.submit(std::move(call), Ends::kAtOnce);
  due_ = more;
  return work;
}

bool EpNormal::byKernels(const c10::Device& device) const {
  return ours_.tokens() && !device.is_cpu() && ours_.tokens()->takes(device);
}

size_t EpNormal::mostTokens(const std::vector<size_t>& fieldBytes, size_t hidden, size_t weights,
                            double rowsPerToken) const {
  size_t rowBytes = 0;
  for (const size_t bytes : fieldBytes) rowBytes += ep::sentBytes({.bytes = bytes});
  return ours_.buffer()->mostTokens(std::max<size_t>(rowBytes, 1), hidden, weights, rowsPerToken);
}

size_t EpNormal::room(const Tensors& fields, size_t weights, double rowsPerToken) const {
  std::vector<size_t> bytes;
  for (const at::Tensor& field : fields) bytes.push_back(size_t(field.size(1)) * field.itemsize());
  return mostTokens(bytes, size_t(fields.front().size(1)), weights, rowsPerToken);
}

bool EpNormal::fitsAtOnce(const Tensors& fields, const Sizes& sizes) const {
  const double rowsPerToken =
      double(std::max<size_t>(sizes.rows, 1)) / double(std::max<size_t>(sizes.tokens, 1));
  return sizes.tokens <= room(fields, sizes.weights, rowsPerToken);
}

bool EpNormal::takesBound(const Tensors& fields, const Bound& bound, std::optional<size_t> weights,
                          int64_t timeoutMicros) {
  const c10::Device home = fields.front().device();
  if (byKernels(home)) return true;
  if (timeoutMicros > 0 || !ours_.usesWords(home)) return false;
  return fitsAtOnce(
      fields, {bound.tokens.value_or(bound.rows), bound.rows, weights.value_or(kMostWeights)});
}

// All ranks compute the same, and each piece has the same tokens of every rank. A rank that was
// skipped does not know the sizes, so there is one piece if ranks may be skipped.
EpNormal::Cut EpNormal::cut(const Tensors& fields, const Sizes& sizes,
                            int64_t timeoutMicros) const {
  const int64_t tokens = fields.front().size(0), most = int64_t(sizes.tokens);
  // Wherever the tokens go: a piece may have more rows than its share.
  const auto least = int64_t(room(fields, sizes.weights, size_));
  TORCH_CHECK_VALUE(least > 0, "the buffer has ", ours_.numBytes(),
                    " bytes, too few for one token of each of ", size_, " ranks: make it larger");
  Cut cut{1, least};
  if (timeoutMicros <= 0) {
    if (!fitsAtOnce(fields, sizes)) cut.pieces = std::max<int64_t>(1, (most + least - 1) / least);
    cut.step = std::max<int64_t>(1, (most + cut.pieces - 1) / cut.pieces);
  }
  TORCH_CHECK_VALUE(tokens <= cut.pieces * cut.step, "x has ", tokens,
                    " tokens. With timeout_us they all go at once, and the buffer has room for ",
                    least, ": make it larger");
  return cut;
}

EpRoute EpNormal::routeOf(const Dispatch& given) const {
  return {.buffer = ours_.buffer(),
          .sizes = {.weights = given.weights.value_or(kMostWeights)},
          .tokens = given.fields.front().size(0),
          .hidden = given.fields.front().size(1),
          .shownRows = int64_t(given.shownRows),
          .isInRank = given.isInRank,
          .ranks = given.ranks ? *given.ranks : ranksOf(given.isInRank),
          .participants = std::vector<bool>(size_t(size_), true)};
}

EpNormal::Arrived EpNormal::dispatch(const Dispatch& given) {
  const at::NoGradGuard guard;
  requireDevice(given.fields.front(), "x");
  Arrived arrived = given.again ? again(given) : given.bound ? bounded(given) : counted(given);
  const int64_t shown = given.again ? given.again->shownRows : int64_t(given.shownRows);
  for (at::Tensor& field : arrived.fields) field = padded(field, shown);
  if (!given.again) arrived.sources = padded(arrived.sources, shown);
  due_ = 0;
  return arrived;
}

EpNormal::Counts EpNormal::count(const Dispatch& given, bool kernels) {
  Counts counts{.ranks = size_t(size_), .experts = size_t(given.perExpert.size(0))};
  const auto run = std::make_shared<CountRun>();
  auto& mine = run->census.numbers;
  mine.push_back(uint32_t(given.fields.front().size(0)));
  const at::Tensor perRank = given.isInRank.sum(0).to(c10::kCPU);
  for (const at::Tensor* of : {&perRank, &given.perExpert}) {
    const int64_t* const numbers = of->const_data_ptr<int64_t>();
    mine.insert(mine.end(), numbers, numbers + of->numel());
  }
  const auto agreed = numbersOf(given.agreed);
  mine.insert(mine.end(), agreed.begin(), agreed.end());
  MaybeTensor mask;
  if (given.activeRanks) mask = maskOn(c10::kCPU, given.activeRanks, size_);
  HostTokens(ours_).setParticipation(*run, nullptr, {}, mask, kernels ? -1 : given.timeoutMicros);
  run->goesOn = true;
  carryOut({run, nullptr}, 1);
  counts.all = std::move(run->census.all);
  counts.there = run->ending.participants;
  return counts;
}

EpNormal::Arrived EpNormal::counted(const Dispatch& given) {
  const c10::Device home = given.fields.front().device();
  const bool kernels = byKernels(home);
  if (kernels) {  // an error that comes later would be one rank's
    requireHomes(given);
    requireFewRanks(given.ranks ? given.ranks->size(1) : size_);
  }
  isAlone_ = false;  // from here on the other ranks wait
  Tensors fields = plain(given.fields, kernels ? home : c10::kCPU);
  EpRoute route = routeOf(given);
  Counts counts = count(given, kernels);
  for (size_t r = 0; r < counts.ranks; ++r) {
    route.sizes.tokens = std::max<size_t>(route.sizes.tokens, counts.tokens(r));
    route.sizes.rows = std::max(route.sizes.rows, counts.rowsOf(r));
  }
  const bool isIn = counts.there.contains(rank_);
  std::string why =
      differenceOf(given.agreed, counts.all, counts.agreed(), isIn ? counts.there : GroupRanks());
  if (why.empty() && given.shownRows > 0 && given.shownRows < route.sizes.rows) {
    why = "a rank receives " + std::to_string(route.sizes.rows) + " tokens, num_worst_tokens is " +
          std::to_string(given.shownRows) + " on rank " + std::to_string(rank_);
  }
  TORCH_CHECK_VALUE(why.empty(), why);
  std::vector<int64_t> expected;
  for (size_t r = 0; r < counts.ranks; ++r)
    expected.push_back(isIn && counts.there.contains(int(r)) ? counts.forRank(r, rank_) : 0);
  Arrived arrived;
  if (kernels) {
    route.participants = flagsOf(counts.there, size_);
    const Bound most{route.sizes.rows, route.sizes.tokens};
    try {
      arrived = dispatchByKernels(ours_, given, std::move(fields), std::move(route), most,
                                  size_t(sumOf(expected)), 0);
    } catch (const std::exception& error) {  // all ranks are in it
      const auto* of = dynamic_cast<const c10::Error*>(&error);
      ours_.tokens()->fail({ErrorCode::kInvalidArgument,
                            "rank " + std::to_string(rank_) + " could not go on: dispatch: " +
                                (of ? of->what_without_backtrace() : error.what())});
      throw;
    }
  } else {
    arrived = sendCounted(given, fields, std::move(route), expected, counts.there);
    arrived.there = tensorOf(arrived.route->participants);
    arrived.table = at::zeros({size_, size_ + 1}, at::kLong);
    auto table = arrived.table.accessor<int64_t, 2>();
    for (size_t r = 0; r < counts.ranks; ++r) {
      for (int to = 0; to < size_ && counts.isIn(rank_, r); ++to)
        table[int64_t(r)][to] = counts.forRank(r, to);
      // A rank that was skipped has no numbers.
      table[int64_t(r)][size_] = int(r) == rank_ ? given.fields.front().size(0) : counts.tokens(r);
    }
  }
  const std::array sizes{int64_t(size_), int64_t(counts.experts)};
  arrived.counted = at::zeros(sizes, at::kLong);
  arrived.experts = at::zeros(sizes, at::kLong);
  for (size_t r = 0; r < counts.ranks; ++r) {
    const auto from = counts.all[r].begin() + ptrdiff_t(1 + counts.ranks);
    const auto to = ptrdiff_t(r * counts.experts);
    std::copy_n(from, counts.experts, arrived.counted.mutable_data_ptr<int64_t>() + to);
    if (counts.isIn(rank_, r))
      std::copy_n(from, counts.experts, arrived.experts.mutable_data_ptr<int64_t>() + to);
  }
  return arrived;
}

// The rows of all pieces stand in the order of rank and token. Each rank's rows have places for the
// number that it announced. `expected`: that number, by rank. `there`: the ranks that gave numbers;
// receives the ranks that took part.
EpNormal::Arrived EpNormal::sendCounted(const Dispatch& given, const Tensors& fields, EpRoute route,
                                        const std::vector<int64_t>& expected, GroupRanks& there) {
  const HostTokens host(ours_);
  const auto [pieces, step] = cut(fields, route.sizes, given.timeoutMicros);
  if (given.timeoutMicros > 0) {  // numbers that a rank that was skipped knows, too
    route.sizes.tokens = size_t(step);
    route.sizes.rows = size_t(step * size_);
  }
  Tensors into = host.newRows(fields, sumOf(expected), c10::kCPU);
  into.push_back(at::empty({sumOf(expected)}, at::kInt));
  int32_t* const sources = into.back().mutable_data_ptr<int32_t>();
  const auto begins = beginsOf(expected);
  auto filled = begins;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = std::min(piece * step, route.tokens);
    const int64_t end = std::min((piece + 1) * step, route.tokens);
    Tensors parts;
    for (const at::Tensor& field : fields) parts.push_back(field.narrow(0, begin, end - begin));
    std::vector<int64_t> left;
    for (size_t r = 0; r < filled.size(); ++r) left.push_back(begins[r] + expected[r] - filled[r]);
    const auto run = host.placedRun(nullptr, parts, route.ranks.narrow(0, begin, end - begin), step,
                                    route.hidden, into, filled, left, 0);
    MaybeTensor mask;
    if (given.activeRanks) mask = maskOn(c10::kCPU, given.activeRanks, size_);
    host.setParticipation(*run, nullptr, flagsOf(there, size_), mask, given.timeoutMicros);
    run->goesOn = piece + 1 < pieces;
    carryOut({run, nullptr}, int(run->goesOn));
    there &= run->ending.participants;
    route.pieces.push_back({begin, end, {ours_.buffer(), run->call.handle, c10::kCPU}, {}});
    if (pieces > 1) route.pieces.back().firstRows = filled;
    const auto counts = countsOf(*run->call.handle);
    for (size_t r = 0; r < filled.size(); ++r) {
      for (int64_t i = 0; i < counts[r]; ++i) sources[filled[r] + i] += int32_t(piece * step);
      filled[r] += counts[r];
    }
  }

  std::vector<int64_t> counts;  // without the rows of ranks that have gone meanwhile
  for (size_t r = 0; r < filled.size(); ++r) {
    const bool isLeft = there.contains(rank_) && there.contains(int(r));
    counts.push_back(isLeft ? filled[r] - begins[r] : 0);
  }
  if (counts != expected) {
    for (at::Tensor& one : into) one = joined(one, begins, counts);
    const auto now = beginsOf(counts);
    for (EpRoute::Piece& piece : route.pieces) {
      uint32_t next = 0;
      for (size_t r = 0; r < counts.size(); ++r) {
        auto& range = piece.handle.dispatch->ranges[r];
        range = {next, counts[r] > 0 ? range.count : 0};
        next += range.count;
        if (pieces > 1) piece.firstRows[r] += now[r] - begins[r];
      }
    }
  }
  route.sources = into.back().clone();
  route.rows = sumOf(counts);
  route.participants = flagsOf(there, size_);
  route.ends = at::empty({size_}, at::kInt);
  std::inclusive_scan(counts.begin(), counts.end(), route.ends.mutable_data_ptr<int32_t>());
  show(given.activeRanks, tensorOf(route.participants).logical_not());
  Arrived arrived{.sources = std::move(into.back()), .route = std::move(route)};
  into.pop_back();
  arrived.fields = std::move(into);
  return arrived;
}

// Nothing waits for the counts: they are exchanged when a stream with words has come to the call.
EpNormal::Arrived EpNormal::bounded(const Dispatch& given) {
  const c10::Device home = given.fields.front().device();
  const Bound& bound = *given.bound;
  Tensors fields = plain(given.fields, home);
  EpRoute route = routeOf(given);
  route.sizes.tokens = bound.tokens.value_or(bound.rows);
  route.sizes.rows = bound.rows;
  const uint32_t agreed = hashOf(given.agreed);
  if (byKernels(home)) {
    const uint64_t of = given.of ? given.of->number() : 0;
    return dispatchByKernels(ours_, given, std::move(fields), std::move(route), bound, bound.rows,
                             fnv1a({of}, agreed));
  }
  requireHomes(given);
  const HostTokens host(ours_);
  const auto rows = int64_t(bound.rows);
  const auto ints = at::TensorOptions(at::kInt).device(home);
  // If the call fails, nothing is written.
  Arrived arrived{.fields = host.newRows(fields, rows, home),
                  .sources = at::zeros({rows}, ints),
                  .table = at::zeros({size_, size_ + 1}, ints.dtype(at::kLong)),
                  .there = at::zeros({size_}, ints.dtype(at::kBool))};
  route.rows = rows;
  route.ends = at::zeros({size_}, ints);
  route.isBounded = true;
  const auto staging = ours_.stagingFor(home);
  const auto run = std::make_shared<BoundedRun>();
  host.fillIn(*run, staging.get(), fields, route.ranks.size(1), route.hidden,
              fnv1a({bound.tokens.value_or(0), route.sizes.weights}, agreed));
  run->buffer = ours_.buffer().get();
  run->ranks = staging->input(route.ranks, "token_ranks");
  run->weights = route.sizes.weights;
  if (given.of) run->of = given.of->pieces.front().handle.dispatch;
  run->usedRows = staging->newCounts(1);
  host.placeBounded(*run, *staging, arrived.fields, run->usedRows);
  run->kept.push_back(
      staging->output(arrived.sources.unsqueeze(0), "the sources", {.counts = run->usedRows}));
  run->call.sources = run->kept.back().mutable_data_ptr<int32_t>();
  run->ends = staging->output(route.ends, "the ends");
  run->table = staging->output(arrived.table, "the table");
  run->there = staging->output(arrived.there, "the participants");
  host.setParticipation(*run, staging.get(), {}, given.activeRanks, -1);
  route.pieces.push_back(
      {0, route.tokens, {ours_.buffer(), run->call.handle, home, std::nullopt, run->usedRows}, {}});
  arrived.work = carryOut({run, staging}, 0);
  Tensors all = arrived.fields;
  all.push_back(arrived.sources);
  clearBehind(all, route.ends);
  arrived.route = std::move(route);
  return arrived;
}

EpNormal::Arrived EpNormal::again(const Dispatch& given) {
  const EpRoute& route = *given.again;
  const c10::Device home = given.fields.front().device();
  TORCH_CHECK_VALUE(given.fields.front().size(0) == route.tokens, "x has ",
                    given.fields.front().size(0), " tokens, those of the handle's dispatch were ",
                    route.tokens);
  const bool isOnDevice = route.kernels || route.isBounded || ours_.usesWords(home);
  if (isOnDevice) requireHomes(given);
  if (route.kernels || route.isBounded)
    requireHome(route.ends.device(), given.fields.front(), "part 0 of the rows");
  const c10::Device place = isOnDevice ? home : c10::kCPU;
  const Tensors fields = plain(given.fields, place);
  if (route.kernels) return againByKernels(ours_, given, fields);
  if (route.isBounded) return againBounded(given, fields);
  const HostTokens host(ours_);
  const auto [pieces, step] = cut(fields, route.sizes, given.timeoutMicros);
  const uint32_t agreed = hashOf(fields, route.number());
  // One mask for all pieces: a rank that is lost in one takes no part in the next ones.
  MaybeTensor mask = given.activeRanks;
  if (pieces > 1 || (mask && (mask->device() != place || !mask->is_contiguous())))
    mask = maskOn(place, given.activeRanks, size_);
  Arrived arrived{.fields = host.newRows(fields, route.rows, place)};
  const int32_t* const sources = route.sources.const_data_ptr<int32_t>();
  const int32_t* const ends = route.ends.const_data_ptr<int32_t>();
  std::vector<int64_t> begins(size_t(size_), 0);
  std::copy_n(ends, size_ - 1, begins.begin() + 1);
  auto filled = begins;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = std::min(piece * step, route.tokens);
    const int64_t end = std::min((piece + 1) * step, route.tokens);
    std::vector<int64_t> counts;  // rows of the piece's tokens, by rank
    for (size_t r = 0; r < filled.size(); ++r) {
      int64_t next = filled[r];
      while (next < ends[r] && sources[next] < (piece + 1) * step) ++next;
      counts.push_back(next - filled[r]);
    }
    Tensors parts;
    for (const at::Tensor& field : fields) parts.push_back(field.narrow(0, begin, end - begin));
    // A staged tensor goes to the device as a whole, so a piece has its own.
    const bool isApart = isOnDevice && pieces > 1;
    const Tensors into = isApart ? host.newRows(fields, sumOf(counts), home) : arrived.fields;
    const auto places = isApart ? beginsOf(counts) : filled;
    const auto staging = ours_.stagingFor(place);
    const auto run = host.placedRun(staging.get(), parts, route.ranks.narrow(0, begin, end - begin),
                                    step, route.hidden, into, places, counts, agreed);
    run->zerosOthers = true;
    host.setParticipation(*run, staging.get(), route.participants, mask, given.timeoutMicros);
    run->goesOn = piece + 1 < pieces;
    carryOut({run, staging}, int(run->goesOn));
    for (size_t r = 0; r < filled.size(); ++r) {
      for (size_t i = 0; i < into.size() && isApart; ++i)
        arrived.fields[i]
            .narrow(0, filled[r], counts[r])
            .copy_(into[i].narrow(0, places[r], counts[r]));
      filled[r] += counts[r];
    }
  }
  for (int64_t r = 0; pieces > 1 && r < size_; ++r) {
    const int64_t begin = begins[size_t(r)], count = ends[r] - begin;
    for (const at::Tensor& field : arrived.fields)
      asBytes(field.narrow(0, begin, count)).masked_fill_(mask->narrow(0, r, 1).eq(0), 0);
  }
  if (given.activeRanks && !mask->is_same(*given.activeRanks))
    show(given.activeRanks, mask->narrow(0, 0, size_).eq(0));
  return arrived;
}

EpNormal::Arrived EpNormal::againBounded(const Dispatch& given, const Tensors& fields) {
  const EpRoute& route = *given.again;
  TORCH_CHECK_VALUE(fitsAtOnce(fields, route.sizes), "the buffer has ", ours_.numBytes(),
                    " bytes, too few for ", route.sizes.rows, " rows at once: make it larger");
  const HostTokens host(ours_);
  const c10::Device home = route.ends.device();
  const auto staging = ours_.stagingFor(home);
  const auto run = std::make_shared<BoundedAgainRun>();
  host.fillIn(*run, staging.get(), fields, route.ranks.size(1), route.hidden, hashOf(fields, 0));
  Arrived arrived{.fields = host.newRows(fields, route.rows, home)};
  run->first = route.pieces.front().handle.dispatch;
  run->usedRows = staging->newCounts(1);
  host.placeBounded(*run, *staging, arrived.fields, run->usedRows);
  run->zerosOthers = true;
  host.setParticipation(*run, staging.get(), {}, given.activeRanks, given.timeoutMicros);
  carryOut({run, staging}, 0);
  keepUntilPassed(route.ends, currentOn(home));
  clearBehind(arrived.fields, route.ends);
  return arrived;
}

EpNormal::Combined EpNormal::combine(const Combine& given) {
  const at::NoGradGuard guard;
  const EpRoute& route = given.route;
  const c10::Device home = given.x.device();
  requireDevice(given.x, "x");
  if (given.weights) {
    const int64_t rows = given.weights->size(0), columns = given.weights->size(1);
    TORCH_CHECK_VALUE(size_t(columns) <= route.sizes.weights, "topk_weights has ", columns,
                      " columns, there is room for ", route.sizes.weights,
                      " after the handle's dispatch");
    TORCH_CHECK_VALUE(rows >= route.rows, "topk_weights has ", rows,
                      " rows, the dispatch received ", route.rows);
  }
  Combine plainly{.x = plain(given.x, home),
                  .route = route,
                  .activeRanks = given.activeRanks,
                  .timeoutMicros = given.timeoutMicros,
                  .inBackground = given.inBackground};
  if (!home.is_cpu()) {
    requireHome(home, given.weights, "topk_weights");
    requireHome(home, given.activeRanks, "active_ranks");
    for (const at::Tensor& bias : given.biases) requireHome(home, bias, "bias");
  }
  plainly.biases = plain(given.biases, home);
  if (given.weights) plainly.weights = plain(*given.weights, home);
  const auto options = at::TensorOptions(home);
  Combined made{.sums = HostTokens(ours_).newRows({plainly.x}, route.tokens, home).front(),
                // If the call fails, nothing is written.
                .missing = at::ones({route.tokens}, options.dtype(at::kBool))};
  if (given.weights) {
    made.weightSums = at::empty({route.tokens, given.weights->size(1)}, options.dtype(at::kFloat));
  }
  if (route.kernels) {
    combineByKernels(ours_, plainly, made);
    due_ = 0;
    return made;
  }
  std::vector<EpBuffer::Call> calls;
  Tensors masks;
  for (const EpRoute::Piece& piece : route.pieces) {
    MaybeTensor mask = given.activeRanks;
    // In the background the caller's mask changes when it waits.
    if (mask && home.is_cpu()) mask = masks.emplace_back(maskOn(home, mask, size_));
    calls.push_back(HostTokens(ours_).sumsOf(plainly, piece, made, mask));
  }
  due_ = 0;
  std::vector<std::shared_ptr<EpWork>> works;
  for (EpBuffer::Call& call : calls) {
    works.push_back(ours_.submit(std::move(call),
                                 given.inBackground ? Ends::kByEvent : Ends::kAtOnce,
                                 works.empty() ? nullptr : works.back()));
  }
  made.work = works.front();
  if (works.size() == 1 && masks.empty()) return made;
  made.work = std::make_shared<PiecesWork>(std::move(works), std::move(masks), given.activeRanks);
  if (!given.inBackground && home.is_cpu()) made.work->wait();
  return made;
}

}  // namespace mooncake
