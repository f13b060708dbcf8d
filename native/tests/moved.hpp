// What a random plan must leave behind: memory of its own for both sides, and the expected target by loops.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/host.hpp"
#include "random_plans.hpp"

namespace kvlink::testing {

// Exactly `bytes` at an address that is `offset` past a multiple of 64, so that a sanitizer sees both ends passed.
class Memory {
 public:
  Memory(std::int64_t bytes, std::int64_t offset)
      : size_(static_cast<std::size_t>(bytes)), block_(::operator new(size_ + static_cast<std::size_t>(offset), kLine)),
        data_(static_cast<std::byte*>(block_.get()) + offset) {}

  std::byte* data() const { return data_; }
  std::int64_t address() const { return reinterpret_cast<std::int64_t>(data_); }
  std::size_t size() const { return size_; }
  bool operator==(const Memory& other) const { return std::memcmp(data_, other.data_, size_) == 0; }

  void fill(Random& random) const {
    for (std::size_t i = 0; i < size_; ++i) data_[i] = static_cast<std::byte>(random());
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(void* block) const { ::operator delete(block, kLine); }
  };
  std::size_t size_;
  std::unique_ptr<void, Free> block_;
  std::byte* data_;
};

inline std::uint32_t stored_at(const std::byte* at, std::int64_t bytes) {
  std::uint32_t value = 0;
  std::memcpy(&value, at, static_cast<std::size_t>(bytes));
  return value;
}

inline std::uint32_t convert_stored(const Conversion& convert, std::uint32_t stored, float source_scale,
                                    float target_factor) {
  std::uint32_t result = 0;
  const kernels::Conversion types{convert.source, convert.target};
  kernels::with_types(&types, [&]<class Source, class Target>() {
    if constexpr (!std::is_same_v<Source, kernels::NoType>) {
      result = kernels::convert_one<Source, Target>(stored, source_scale, target_factor);
    }
  });
  return result;
}

inline void expect(const RandomPlan& plan, const std::byte* source, std::byte* target) {
  walk(plan.segments, [&](std::int64_t from, std::int64_t to, std::int64_t bytes, const Segment& segment,
                          std::size_t scale) {
    if (!segment.convert) {
      std::memcpy(target + to, source + from, static_cast<std::size_t>(bytes));
      return;
    }
    const Conversion& convert = *segment.convert;
    const float source_scale = convert.source_scales.empty() ? 1.0f : convert.source_scales[scale];
    const float target_factor = convert.target_factors.empty() ? 1.0f : convert.target_factors[scale];
    for (std::int64_t i = 0; i < bytes / convert.source_bytes(); ++i) {
      const std::uint32_t stored = stored_at(source + from + i * convert.source_bytes(), convert.source_bytes());
      const std::uint32_t result = convert_stored(convert, stored, source_scale, target_factor);
      std::memcpy(target + to + i * convert.target_bytes(), &result, static_cast<std::size_t>(convert.target_bytes()));
    }
  });
}

// What a test moves: drawn bytes at a drawn place, a target that is untouched, and what it is to hold afterwards.
struct Sides {
  Sides(const RandomPlan& plan, Random& rng)
      : source(plan.source_bytes, pick(rng, 0, 63)), target(plan.target_bytes, pick(rng, 0, 63)),
        expected(plan.target_bytes, target.address() % 64) {
    source.fill(rng);
    wipe();
    std::memcpy(expected.data(), target.data(), target.size());
    expect(plan, source.data(), expected.data());
  }

  // The target is as before.
  void wipe() const { std::memset(target.data(), 0x5a, target.size()); }

  const Memory source;
  const Memory target;
  const Memory expected;
};

// Every second plan converts, each time between other types.
inline RandomPlan random_moves(std::uint64_t seed, std::int64_t align) {
  RandomPlan plan;
  plan.align = align;
  plan.convert = seed % 2 == 1;
  plan.source = static_cast<Element>(seed / 2 % 6);
  plan.target = static_cast<Element>(seed / 12 % 6);
  return random_plan(seed, plan);
}

}  // namespace kvlink::testing
