#include "backend/tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/hash.h"
#include "collectives/buffers.h"

namespace mooncake {

Result<DType> dtypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kShort:
      return DType::kInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kInt:
      return DType::kInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kLong:
      return DType::kInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBool:
      return DType::kBool;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz:
      return DType::kFloat8E5M2FNUZ;
    case at::kFloat8_e8m0fnu:
      return DType::kFloat8E8M0FNU;
    default:
      return Error{
          ErrorCode::kInvalidArgument,
          std::string("tensors of type ") + at::toString(tensor.scalar_type()) + " cannot be sent"};
  }
}

Status checkDense(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined())
    return Error{ErrorCode::kInvalidArgument, std::string(what) + " is undefined"};
  if (tensor.is_meta())
    return Error{ErrorCode::kInvalidArgument, std::string(what) + " is on meta, without data"};
  if (tensor.is_nested() || tensor.layout() != at::kStrided) {
    return Error{ErrorCode::kInvalidArgument,
                 c10::str(what, tensor.is_nested() ? " is nested, of layout " : " has the layout ",
                          tensor.layout(), ", must be dense (Strided)")};
  }
  if (tensor.is_quantized()) {
    return Error{ErrorCode::kInvalidArgument,
                 std::string(what) +
                     " is quantized: its scale would be lost; send int_repr(), and "
                     "the scale by itself"};
  }
  if (tensor.numel() > 0 && !tensor.storage().data()) {
    return Error{ErrorCode::kInvalidArgument,
                 std::string(what) +
                     " has no memory: it is a fake tensor, one that wraps others, "
                     "or its storage was freed"};
  }
  return {};
}

Status checkTensor(const at::Tensor& tensor, const char* what) {
  if (tensor.defined() && !tensor.is_cpu()) {
    return Error{ErrorCode::kInvalidArgument,
                 std::string(what) + " is on " + tensor.device().str() + ", must be a CPU tensor"};
  }
  return checkDense(tensor, what);
}

PlainWrites::PlainWrites(const at::Tensor& tensor) {
  if (tensor.is_inference()) inference_.emplace();
}

Flat::Flat(at::Tensor tensor) : tensor_(std::move(tensor)), flat_(tensor_) {
  // A contiguous tensor of one element, or of none, may have any strides.
  if (!tensor_.is_contiguous() || tensor_.is_conj() || tensor_.is_neg()) standApart();
}

Flat Flat::scaled(at::Tensor tensor, const at::Scalar& factor) {
  Flat flat(std::move(tensor));
  flat.standApart();
  flat.factor_ = factor;
  return flat;
}

void Flat::standApart() {
  if (isCopy()) return;
  flat_ = at::empty(tensor_.sizes(), tensor_.scalar_type());
  source_ = tensor_.detach();
  isFilled_ = false;
}

std::span<std::byte> Flat::bytes() const {
  if (!isFilled_) {
    const PlainWrites plain(flat_);
    flat_.copy_(source_);
    if (factor_) flat_.mul_(*factor_);
    isFilled_ = true;
  }
  return place();
}

void Flat::copyBack() const {
  if (flat_.is_same(tensor_)) return;
  const PlainWrites plain(tensor_);
  tensor_.copy_(flat_.view_as(tensor_));
}

std::vector<Flat> flatten(const std::vector<at::Tensor>& tensors) {
  return std::vector<Flat>(tensors.begin(), tensors.end());
}

std::vector<Span> spansOf(const std::vector<Flat>& flats) {
  std::vector<Span> spans;
  for (const Flat& flat : flats) spans.push_back(flat.bytes());
  return spans;
}

std::vector<Span> placesOf(const std::vector<Flat>& flats) {
  std::vector<Span> places;
  for (const Flat& flat : flats) places.push_back(flat.place());
  return places;
}

std::vector<Span> partsOf(Span bytes, int size) {
  const size_t each = bytes.size() / size_t(size);
  std::vector<Span> parts;
  for (size_t r = 0; r < size_t(size); ++r) parts.push_back(bytes.subspan(r * each, each));
  return parts;
}

void copyBack(const Status& status, const std::vector<Flat>& flats) {
  if (!status.ok()) return;
  for (const Flat& flat : flats) flat.copyBack();
}

namespace {

bool overlap(ConstSpan a, ConstSpan b) {
  return a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
}

// The usual case: all of `ones` lie before or behind all of `others`.
bool areApart(const std::vector<Span>& ones, const std::vector<Span>& others) {
  const auto hull = [](const std::vector<Span>& spans) {
    const std::byte *begin = spans[0].data(), *end = begin;
    for (const Span span : spans) {
      begin = std::min<const std::byte*>(begin, span.data());
      end = std::max<const std::byte*>(end, span.data() + span.size());
    }
    return ConstSpan(begin, end);
  };
  return !overlap(hull(ones), hull(others));
}

}  // namespace

std::vector<Flat> inputsBeside(const std::vector<at::Tensor>& inputs,
                               const std::vector<Span>& outputs, int rank) {
  std::vector<Flat> flats = flatten(inputs);
  if (outputs.empty() || areApart(placesOf(flats), outputs)) return flats;
  std::vector<Span> places = outputs;
  std::erase_if(places, [](Span place) { return place.empty(); });
  std::ranges::sort(places, {}, [](Span place) { return place.data(); });
  for (size_t i = 0; i < flats.size(); ++i) {
    const Span bytes = flats[i].place(), own = outputs[size_t(rank) * flats.size() + i];
    if (bytes.empty() || bytes.data() == own.data())
      continue;  // fills its own output, so overlaps no other
    const auto behind = std::ranges::lower_bound(places, bytes.data() + bytes.size(), {},
                                                 [](Span place) { return place.data(); });
    if (behind != places.begin() && overlap(*std::prev(behind), bytes)) flats[i].standApart();
  }
  return flats;
}

Flat outputBeside(const at::Tensor& output, std::span<const Flat> inputs) {
  Flat flat(output);
  for (const Flat& input : inputs) {
    if (!overlap(input.place(), flat.place())) continue;
    flat.standApart();
    break;
  }
  return flat;
}

ConstSpan extentOf(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {begin, size_t(last + 1) * tensor.itemsize()};
}

void keepApart(std::vector<Flat>& flats) {
  struct Extent {
    ConstSpan bytes;
    size_t flat;
  };
  std::vector<Extent> extents;
  for (size_t i = 0; i < flats.size(); ++i) {
    if (flats[i].tensor().numel() > 0) extents.push_back({extentOf(flats[i].tensor()), i});
  }
  std::ranges::sort(extents, {}, [](const Extent& one) { return one.bytes.data(); });
  // One run of extents: each begins before an earlier extent of the run has ended.
  size_t first = 0;
  const std::byte* end = nullptr;
  for (size_t i = 0; i < extents.size(); ++i) {
    const ConstSpan bytes = extents[i].bytes;
    if (i > 0 && bytes.data() < end) {
      flats[extents[first].flat].standApart();
      flats[extents[i].flat].standApart();
    } else {
      first = i;
    }
    end = std::max(end, bytes.data() + bytes.size());
  }
}

std::span<std::byte> bytesOf(const at::Tensor& contiguous) {
  return {static_cast<std::byte*>(contiguous.data_ptr()), contiguous.nbytes()};
}

std::vector<Span> cut(Span bytes, const std::vector<int64_t>& elements, size_t elementSize) {
  std::vector<Span> pieces;
  for (const int64_t count : elements) {
    pieces.push_back(bytes.first(size_t(count) * elementSize));
    bytes = bytes.subspan(pieces.back().size());
  }
  return pieces;
}

namespace {

// A row of at least this length is fetched alone: a system call costs less than two copies.
constexpr size_t kShortRow = 64 << 10;

}  // namespace

FlatList::FlatList(std::vector<Flat> flats, int rows, bool isShort)
    : flats_(std::move(flats)), rows_(rows) {
  struct OneType {
    DType dtype;
    std::vector<size_t> members;
  };
  std::vector<OneType> shortOnes;  // in the order of the list
  for (size_t i = 0; i < flats_.size(); ++i) {
    const Buffer buffer{flats_[i].place(), *dtypeOf(flats_[i].tensor())};
    if (isShort || buffer.data.size() / size_t(rows) >= kShortRow) {
      buffers_.push_back(buffer);
      continue;
    }
    auto of = std::ranges::find(shortOnes, buffer.dtype, &OneType::dtype);
    if (of == shortOnes.end()) of = shortOnes.insert(of, {buffer.dtype, {}});
    of->members.push_back(i);
  }
  for (auto& [dtype, members] : shortOnes) {
    // Hash of the places of the short tensors in the list. As buffers they come after all long
    // ones, and a list in another order is another call.
    uint32_t places = 1;
    for (const size_t member : members) places = fnv1a({member}, places);
    if (members.size() == 1) {
      const bool isAlone = flats_.size() == 1;  // the same call as for a tensor without a list
      buffers_.push_back({flats_[members[0]].place(), dtype, isAlone ? 0 : places});
      continue;
    }
    int64_t bytes = 0;
    for (const size_t member : members) bytes += int64_t(flats_[member].place().size());
    bundles_.push_back({at::empty({bytes}, at::kByte), std::move(members)});
    uint32_t lengths = places;
    for (const size_t member : bundles_.back().members)
      lengths = fnv1a({flats_[member].place().size()}, lengths);
    buffers_.push_back({bytesOf(bundles_.back().bytes), dtype, lengths});
  }
}

void FlatList::fill() const {
  if (std::exchange(isFilled_, true)) return;
  for (const Flat& flat : flats_) (void)flat.bytes();
  for (const Bundle& bundle : bundles_) {
    forEachPiece(bundle, [](std::byte* together, Span piece) {
      std::memcpy(together, piece.data(), piece.size());
    });
  }
}

Buffers FlatList::buffers() const {
  fill();
  return buffers_;
}

template <typename Copy>
void FlatList::forEachPiece(const Bundle& bundle, Copy&& copy) const {
  std::byte* together = bytesOf(bundle.bytes).data();
  for (int row = 0; row < rows_; ++row) {
    for (const size_t member : bundle.members) {
      const Span all = flats_[member].place();
      const Span piece =
          all.subspan(all.size() / size_t(rows_) * size_t(row), all.size() / size_t(rows_));
      if (!piece.empty()) copy(together, piece);
      together += piece.size();
    }
  }
}

std::vector<Span> FlatList::rows() const {
  fill();
  std::vector<Span> rows;
  for (size_t row = 0; row < size_t(rows_); ++row) {
    for (const Buffer& buffer : buffers_) {
      const size_t bytes = buffer.data.size() / size_t(rows_);
      rows.push_back(buffer.data.subspan(row * bytes, bytes));
    }
  }
  return rows;
}

void FlatList::copyBack() const {
  for (const Bundle& bundle : bundles_) {
    forEachPiece(bundle, [](std::byte* together, Span piece) {
      std::memcpy(piece.data(), together, piece.size());
    });
  }
  for (const Flat& flat : flats_) flat.copyBack();
}

}  // namespace mooncake
