// Packs a plan's source side into staging slots, and unpacks slots into its target side: the seam between what carries
// packed bytes (UCX, a shared mapping) and what touches the caches (the host here; a GPU's kernels).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "plan.hpp"
#include "staging.hpp"
#include "stores_found.hpp"

namespace kvlink {

// One slot's work, begun. Used by one thread.
class PackJob {
 public:
  enum class Step {
    ran,      // a bounded piece was done (some 50 us); there is more
    waiting,  // a device is at work; step again when there is time, or when Packer::fd() is readable
    done,     // the bytes are where they belong, and the digests are written
  };

  // Waits for the device, if any: after it nothing of the job touches memory.
  virtual ~PackJob() = default;
  // Not after `done`. Throws std::runtime_error when the job failed; then it is over, and what it wrote counts nothing.
  virtual Step step() = 0;
};

// Wire bytes [begin, end) of a plan: whole leaves, or up to the plan's end. All that it points to outlives the job, and
// the caller has checked the plan's bounds.
struct PackRange {
  const Plan& plan;
  std::int64_t begin;
  std::int64_t end;
  std::span<std::uint64_t> leaves = {};  // receives the digests of the range's leaves; empty: none are wanted
};

class Packer {
 public:
  virtual ~Packer() = default;

  // Begins to copy the range from the source's regions to `slot`, aligned to 64 bytes, in wire order. The memory is
  // read within step(), and between a step() that was `waiting` and the job's end.
  virtual std::unique_ptr<PackJob> gather(const PackRange& range, std::span<const std::byte* const> regions,
                                          std::byte* slot) = 0;
  // The reverse: from `slot` into the target's regions, converting where the plan does. The digests are of the bytes
  // that were scattered, as they were in the slot, whoever writes it meanwhile. Requires Plan::cuts_no_element().
  virtual std::unique_ptr<PackJob> scatter(const PackRange& range, const std::byte* slot,
                                           std::span<std::byte* const> regions) = 0;

  // Memory for slots that this packer, and what carries them, can touch. Any thread. Throws std::runtime_error.
  virtual std::unique_ptr<StagingMemory> staging(std::size_t bytes) { return std::make_unique<HugeMemory>(bytes); }

  // Readable when jobs that wait may go on; -1 where none ever waits.
  virtual int fd() const { return -1; }
};

// On the calling thread.
class HostPacker final : public Packer {
 public:
  std::unique_ptr<PackJob> gather(const PackRange& range, std::span<const std::byte* const> regions,
                                  std::byte* slot) override;
  std::unique_ptr<PackJob> scatter(const PackRange& range, const std::byte* slot,
                                   std::span<std::byte* const> regions) override;

 private:
  std::array<StoresFound, 2> short_rows_{StoresFound(false), StoresFound(false)};  // without digests, and with
  std::array<StoresFound, 2> long_rows_{StoresFound(true), StoresFound(true)};
};

}  // namespace kvlink
