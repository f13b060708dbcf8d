// Staging memory: where bytes lie packed, in wire order, between a cache and the wire. Slots of one size in one
// stretch, so that one registration, or one mapping, serves them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvlink {

// One slot holds what is packed at a time: hashed, sent and unpacked while it is in a core's cache.
inline constexpr std::int64_t kSlotBytes = 512 * 1024;

// Memory that slots lie in, whoever gave it.
class StagingMemory {
 public:
  virtual ~StagingMemory() = default;
  virtual std::byte* data() const = 0;
  virtual std::size_t bytes() const = 0;
};

// Zeroed anonymous memory, on huge pages where the system gives them. Throws std::system_error.
class HugeMemory final : public StagingMemory {
 public:
  explicit HugeMemory(std::size_t bytes);
  ~HugeMemory() override;
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;

  std::byte* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }

 private:
  std::byte* data_;
  std::size_t bytes_;  // whole huge pages
};

// Which slots of a staging memory are free. Whose memory it is does not matter here; one thread uses it.
class Slots {
 public:
  Slots(std::byte* data, std::size_t count, std::int64_t slot_bytes = kSlotBytes);

  std::size_t count() const { return count_; }
  std::int64_t slot_bytes() const { return slot_bytes_; }
  std::byte* at(std::size_t slot) const { return data_ + slot * static_cast<std::size_t>(slot_bytes_); }
  std::int64_t offset(std::size_t slot) const { return static_cast<std::int64_t>(slot) * slot_bytes_; }

  bool any_free() const { return !free_.empty(); }
  // The one that came back last, whose memory a cache may hold still.
  std::optional<std::size_t> take();
  void give_back(std::size_t slot) { free_.push_back(slot); }

 private:
  std::byte* data_;
  std::size_t count_;
  std::int64_t slot_bytes_;
  std::vector<std::size_t> free_;
};

}  // namespace kvlink
