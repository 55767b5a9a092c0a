#pragma once

#include <cstdint>

#include <ATen/core/Generator.h>

#include "devices.h"

namespace fake_device {

// A random generator of a device. Its state is a seed and an offset, 8 bytes each, as CUDA's: torch
// computes with the two to give each shard of a DTensor its own numbers. The numbers are those of a
// CPU generator, which is seeded anew for each call of an operation. The first call after a seed
// has the numbers of a CPU generator with that seed.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  // Returns a CPU generator for one operation, and moves the offset on. Called with mutex_ held.
  at::Generator forOneCall();

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  Generator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

// Returns the device's own generator; device -1: that of the current device.
at::Generator& defaultGenerator(c10::DeviceIndex device);

}  // namespace fake_device
