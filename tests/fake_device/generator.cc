#include "generator.h"

#include <array>
#include <cstring>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "streams.h"

namespace fake_device {

namespace {

constexpr uint64_t kStep = 4;  // of the offset: torch demands a multiple of four
constexpr size_t kStateBytes = 16;

c10::DeviceIndex orCurrent(c10::DeviceIndex device) {
  return device < 0 ? currentDevice() : device;
}

}  // namespace

Generator::Generator(c10::DeviceIndex device)
    : GeneratorImpl(c10::Device(kType, orCurrent(device)),
                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

at::Generator Generator::forOneCall() {
  // A golden-ratio step makes other seeds of the offsets, and no change for offset 0.
  at::Generator host = at::detail::createCPUGenerator(seed_ + offset_ * 0x9e3779b97f4a7c15);
  offset_ += kStep;
  return host;
}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t Generator::current_seed() const { return seed_; }

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Generator::set_offset(uint64_t offset) {
  TORCH_CHECK(offset % kStep == 0, "fake device: a generator's offset must be a multiple of ",
              kStep);
  offset_ = offset;
}

uint64_t Generator::get_offset() const { return offset_; }

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.is_cpu() && state.dtype() == at::kByte && state.numel() == kStateBytes &&
                  state.is_contiguous(),
              "fake device: a generator's state is ", kStateBytes, " bytes on the CPU");
  std::array<uint64_t, 2> words;
  std::memcpy(words.data(), state.data(), kStateBytes);
  set_offset(words[1]);
  seed_ = words[0];
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::empty({int64_t(kStateBytes)}, at::kByte);
  const std::array<uint64_t, 2> words{seed_, offset_};
  std::memcpy(state.mutable_data_ptr(), words.data(), kStateBytes);
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* const copy = new Generator(device_.index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::Generator& defaultGenerator(c10::DeviceIndex device) {
  static auto* const all =
      new std::array<at::Generator, kDevices>{at::make_generator<Generator>(c10::DeviceIndex(0)),
                                              at::make_generator<Generator>(c10::DeviceIndex(1))};
  return all->at(orCurrent(device));
}

}  // namespace fake_device
